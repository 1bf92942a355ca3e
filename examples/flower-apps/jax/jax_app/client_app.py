"""The clients: JAX, whose data come in batches."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedcohort.flower import attach
from jax_app.task import load_data, loss_fn
from jax_app.task import train as jax_train

app = ClientApp()


def my_batches(context: Context):
    partition = context.node_config["partition-id"], context.node_config["num-partitions"]
    return load_data(*partition, context.run_config["batch-size"])


@app.train()
def train(msg: Message, context: Context) -> Message:
    batches, _ = my_batches(context)
    params = msg.content["arrays"].to_numpy_ndarrays()
    params, loss = jax_train(params, batches, context.run_config["learning-rate"])
    n = sum(len(batch["label"]) for batch in batches)
    metrics = MetricRecord({"train_loss": loss, "num-examples": n})
    content = RecordDict({"arrays": ArrayRecord(params), "metrics": metrics})
    return Message(content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    _, batches = my_batches(context)
    params = msg.content["arrays"].to_numpy_ndarrays()
    losses = [float(loss_fn(params, batch["image"], batch["label"])) for batch in batches]
    n = sum(len(batch["label"]) for batch in batches)
    metrics = {"eval_loss": sum(losses) / max(len(losses), 1), "num-examples": max(n, 1)}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)


attach(app, data=load_data)
