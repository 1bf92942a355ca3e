"""Clients: most are honest, some do as the plan says."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcohort.flower import attach, own_id
from fedcohort.flower.messages import RECORD, to_record
from trial.task import LOCAL, federation, model, plan


def data(context):
    if "data" in plan():  # every message starts a process, and reading a file is quicker
        with np.load(plan()["data"]) as file:
            return file[f"{own_id(context)}.x"], file[f"{own_id(context)}.y"]
    whole = federation()
    part = whole.parts[own_id(context)]
    return whole.dataset.x[part], whole.dataset.y[part]


def lies(message, context, call_next):
    """A mod: answer queries for a sketch, or training, with nonsense if the plan says so."""
    lie = plan().get("lies", {}).get(own_id(context))
    kind = message.metadata.message_type
    if "seen" in plan():
        Path(plan()["seen"], own_id(context)).touch()
    if kind == "query.race_sketch" and lie in READINGS:
        record = to_record({"race_sketch": READINGS[lie]()})
        return Message(RecordDict({RECORD: record}), reply_to=message)
    hang(message, context)
    if kind == "train" and lie == "raise":
        raise RuntimeError("the disk is full")
    if kind == "train" and lie == "slow":
        time.sleep(600)
    reply = call_next(message, context)
    if kind == "train" and lie in UPDATES:
        arrays = reply.content["arrays"]
        broken = {k: Array(UPDATES[lie](a.numpy())) for k, a in arrays.items()}
        reply.content["arrays"] = ArrayRecord(broken)
    if kind == "train.upload" and lie == "nan update":
        arrays = reply.content["arrays"]
        broken = {k: Array(a.numpy() * np.float32(np.nan)) for k, a in arrays.items()}
        reply.content["arrays"] = ArrayRecord(broken)
    return reply


def hang(message, context):
    """Start training and never end, if the plan says so: somebody will end this process."""
    hanging = plan().get("hang")
    if not hanging or message.metadata.message_type != "train":
        return
    number = message.content["config"]["server-round"]
    if own_id(context) == hanging["client"] and number == hanging["round"]:
        Path(hanging["file"]).touch()
        time.sleep(600)


READINGS = {
    "nan": lambda: np.float64("nan"),
    "shape": lambda: np.zeros((3, 3), np.int16),
    "huge": lambda: np.zeros(100_000_000, np.uint8),
}

READINGS["huge, nan"] = READINGS["huge"]
UPDATES = {"huge, nan": lambda a: a * np.float32(np.nan), "wrong shape": lambda a: a.ravel()[:1]}

app = ClientApp(mods=[lies])
attach(app, data, model, local=LOCAL)
