"""The clients: `attach` makes them answer, and trains for them."""

from flwr.clientapp import ClientApp

from fedcohort.flower import attach
from fedcohort.simulate import LocalTraining
from quickstart.task import build_model, load_my_data

app = ClientApp()
attach(app, data=load_my_data, model=build_model, local=LocalTraining(epochs=2, lr=0.2))
