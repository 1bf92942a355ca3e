"""The clients: each adds its trees to the global model's."""

import numpy as np
import xgboost as xgb
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.config import unflatten_dict

from quickstart_xgboost.task import PARAMS, booster, load_data

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    partition = context.node_config["partition-id"], context.node_config["num-partitions"]
    data, _, n, _ = load_data(*partition)
    rounds = context.run_config["local-epochs"]
    params = unflatten_dict(context.run_config)["params"]
    model = booster(msg.content["arrays"])
    if model is None:
        model = xgb.train({**PARAMS, **params}, data, num_boost_round=rounds)
    else:
        for _ in range(rounds):
            model.update(data, model.num_boosted_rounds())
        model = model[model.num_boosted_rounds() - rounds : model.num_boosted_rounds()]
    arrays = ArrayRecord([np.frombuffer(model.save_raw("json"), dtype=np.uint8)])
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": n})})
    return Message(content=content, reply_to=msg)
