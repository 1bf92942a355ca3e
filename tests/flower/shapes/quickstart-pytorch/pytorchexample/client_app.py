"""The clients: training and evaluation in PyTorch."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from pytorchexample.task import Net, load_data
from pytorchexample.task import test as test_fn
from pytorchexample.task import train as train_fn

app = ClientApp()


def my_loaders(context: Context):
    partition = context.node_config["partition-id"], context.node_config["num-partitions"]
    return load_data(*partition, context.run_config["batch-size"])


@app.train()
def train(msg: Message, context: Context) -> Message:
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loader, _ = my_loaders(context)
    epochs, lr = context.run_config["local-epochs"], msg.content["config"]["lr"]
    metrics = {"train_loss": train_fn(model, loader, epochs, lr)}
    metrics["num-examples"] = len(loader.dataset)
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, loader = my_loaders(context)
    loss, accuracy = test_fn(model, loader)
    metrics = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(loader.dataset)}
    content = RecordDict({"metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)
