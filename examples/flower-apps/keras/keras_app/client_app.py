"""The clients: Keras, by its own fit and evaluate."""

import keras
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedcohort.flower import attach
from keras_app.task import load_data, load_model

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    keras.backend.clear_session()
    partition = context.node_config["partition-id"], context.node_config["num-partitions"]
    x, y, _, _ = load_data(*partition)
    config = context.run_config
    model = load_model(config["learning-rate"])
    model.set_weights(msg.content["arrays"].to_numpy_ndarrays())
    history = model.fit(
        x, y, epochs=config["local-epochs"], batch_size=config["batch-size"], verbose=0
    )
    metrics = MetricRecord({"num-examples": len(x), "train_loss": history.history["loss"][-1]})
    content = RecordDict({"arrays": ArrayRecord(model.get_weights()), "metrics": metrics})
    return Message(content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    partition = context.node_config["partition-id"], context.node_config["num-partitions"]
    _, _, x, y = load_data(*partition)
    model = load_model()
    model.set_weights(msg.content["arrays"].to_numpy_ndarrays())
    loss, accuracy = model.evaluate(x, y, verbose=0)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(x)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)


attach(app, data=load_data)
