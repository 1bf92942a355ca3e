"""The clients: an app with one line that is ours."""

from flwr.clientapp import ClientApp

from fedcohort.flower import attach
from fedcohort.simulate import LocalTraining
from quickstart.task import build_model, load_my_partition

app = ClientApp()
attach(app, data=load_my_partition, model=build_model, local=LocalTraining(epochs=2, lr=0.2))
