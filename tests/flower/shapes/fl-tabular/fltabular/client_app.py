"""The clients: rows of a table."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fltabular.task import IncomeClassifier, load_data, trainer

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    partition = context.node_config["partition-id"], context.node_config["num-partitions"]
    loader, _ = load_data(*partition)
    model = IncomeClassifier()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    trainer(model, loader, context.run_config["learning-rate"])
    metrics = MetricRecord({"num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    partition = context.node_config["partition-id"], context.node_config["num-partitions"]
    _, loader = load_data(*partition)
    metrics = MetricRecord({"num-examples": len(loader.dataset)})
    content = RecordDict({"metrics": metrics})
    return Message(content=content, reply_to=msg)
