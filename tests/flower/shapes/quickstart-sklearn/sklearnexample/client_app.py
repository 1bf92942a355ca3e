"""The clients: scikit-learn, no torch anywhere."""

import warnings

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.metrics import log_loss

from sklearnexample.task import LABELS, create_model, load_data, parameters

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    partition = context.node_config["partition-id"], context.node_config["num-partitions"]
    x, y, _, _ = load_data(*partition)
    model = create_model(msg.content["arrays"].to_numpy_ndarrays())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # three iterations do not converge
        model.fit(x, y)
    loss = log_loss(y, model.predict_proba(x), labels=model.classes_)
    metrics = MetricRecord({"num-examples": len(x), "train_logloss": loss})
    content = RecordDict({"arrays": ArrayRecord(parameters(model)), "metrics": metrics})
    return Message(content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    partition = context.node_config["partition-id"], context.node_config["num-partitions"]
    _, _, x, y = load_data(*partition)
    model = create_model(msg.content["arrays"].to_numpy_ndarrays())
    loss = log_loss(y, model.predict_proba(x), labels=LABELS)
    metrics = {"num-examples": len(x), "test_logloss": loss, "accuracy": model.score(x, y)}
    content = RecordDict({"metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)
