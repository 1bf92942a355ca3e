"""Clients: most train, some do as the plan says."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from flwr.clientapp import ClientApp

from fedcohort.flower import attach, own_id
from trial.task import fault, federation, local, model, plan


def data(context):
    if "data" in plan():  # every message starts a process, and reading a file is quicker
        with np.load(plan()["data"]) as file:
            return file[f"{own_id(context)}.x"], file[f"{own_id(context)}.y"]
    whole = federation()
    part = whole.parts[own_id(context)]
    return whole.dataset.x[part], whole.dataset.y[part]


def faults(message, context, call_next):
    """A mod: raise, hang or wait before training if the plan says so."""
    kind = message.metadata.message_type
    number = message.content["config"]["server-round"] if kind == "train" else 0
    planned = fault(own_id(context), kind, number)
    if planned:
        Path(planned["file"]).touch()  # the test waits for it
    if planned.get("does") == "raise":
        raise RuntimeError("the disk is full")
    end = time.monotonic() + 3600
    while planned.get("does") in ("hang", "late") and time.monotonic() < end:
        if planned["does"] == "late" and Path(planned["until"]).exists():
            break
        time.sleep(0.2)
    return call_next(message, context)


app = ClientApp(mods=[faults])
attach(app, data, model, local=local())
