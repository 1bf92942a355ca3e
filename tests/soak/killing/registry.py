"""`fedcohort registry add`: sketches and models of clients, with their database."""

from __future__ import annotations

import numpy as np

from .job import CLI, CLI_NEEDS, Job


def write_clients(inputs):
    from safetensors.numpy import save_file

    from fedcohort.sketch.race import RaceSketch

    (inputs / "clients").mkdir()
    for i in range(40):
        sketch = RaceSketch.srp(dim=4, rows=10, bits=3)
        sketch.add(np.random.default_rng(i).normal(size=(20, 4)))
        sketch.save(inputs / "clients" / f"c{i}.sketch")
        save_file({"w": np.full(100, float(i))}, inputs / "clients" / f"c{i}.safetensors")


def registry_arguments(inputs, folder):
    return ["registry", "add", folder / "warm", inputs / "clients", "--replace"]


def clients_of(folder):
    from fedcohort.personalize import Registry

    if not (folder / "warm" / "registry.sqlite").exists():
        return set()
    with Registry(folder / "warm") as registry:
        return {entry.client for entry in registry.entries()}


def registry_of(folder):
    from fedcohort.personalize import Registry, check

    with Registry(folder / "warm") as registry:
        problems = [problem.kind for problem in check(registry) if problem.kind != "orphan"]
        entries = {
            e.client: (e.model, e.metadata, registry.sketch(e.client).to_bytes())
            for e in registry.entries()
        }
    return entries, problems


REGISTRY = Job(
    CLI,
    registry_arguments,
    registry_of,
    (*CLI_NEEDS, "safetensors"),
    ("fedcohort.cli", "fedcohort.personalize", "safetensors.numpy"),
    write_clients,
    held=clients_of,
    continues=False,
)
