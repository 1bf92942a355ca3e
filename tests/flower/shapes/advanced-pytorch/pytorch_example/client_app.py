"""The clients keep their classification head in their state between rounds."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from pytorch_example.task import Net, load_data
from pytorch_example.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    if "head" in context.state:
        model.head.load_state_dict(context.state["head"].to_torch_state_dict())
    partition = context.node_config["partition-id"], context.node_config["num-partitions"]
    loader, _ = load_data(*partition, context.run_config["batch-size"])
    loss = train_fn(model, loader, msg.content["config"]["lr"])
    context.state["head"] = ArrayRecord(model.head.state_dict())
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)
