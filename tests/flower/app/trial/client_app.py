"""Clients: most are honest, some do as the plan says."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp

from fedcohort.flower import attach, own_id
from fedcohort.flower.wire import RECORD, to_bytes
from trial.task import fault, federation, local, model, plan


def data(context):
    if "data" in plan():  # every message starts a process, and reading a file is quicker
        with np.load(plan()["data"]) as file:
            return file[f"{own_id(context)}.x"], file[f"{own_id(context)}.y"]
    whole = federation()
    part = whole.parts[own_id(context)]
    return whole.dataset.x[part], whole.dataset.y[part]


def lies(message, context, call_next):
    """A mod: answer queries for a sketch, or training, with nonsense if the plan says so."""
    client, kind = own_id(context), message.metadata.message_type
    lie = plan().get("lies", {}).get(client)
    if "seen" in plan():
        Path(plan()["seen"], client).touch()
    if kind == "query.fedcohort" and lie in READINGS:
        reply = call_next(message, context)
        if "race_sketch" in reply.content[RECORD]:
            reply.content[RECORD]["race_sketch"] = to_bytes(READINGS[lie]())
        return reply
    number = message.content["config"]["server-round"] if kind == "train" else 0
    planned = fault(client, kind, number)
    if planned:
        Path(planned["file"]).touch()  # the test waits for it
    if planned.get("does") == "raise":
        raise RuntimeError("the disk is full")
    end = time.monotonic() + 3600
    while planned.get("does") in ("hang", "late") and time.monotonic() < end:
        if planned["does"] == "late" and Path(planned["until"]).exists():
            break
        time.sleep(0.2)
    reply = call_next(message, context)
    if kind == "train.fedcohort_upload" and lie == "nan update":
        arrays = reply.content["arrays"]
        broken = {k: Array(a.numpy() * np.float32(np.nan)) for k, a in arrays.items()}
        reply.content["arrays"] = ArrayRecord(broken)
    return reply


READINGS = {
    "nan": lambda: np.float64("nan"),
    "shape": lambda: np.zeros((3, 3), np.int16),
    "huge": lambda: np.zeros(100_000_000, np.uint8),
}


app = ClientApp(mods=[lies])
attach(app, data, model, local=local())
