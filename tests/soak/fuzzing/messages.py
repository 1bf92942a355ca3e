"""What Flower clients and servers send each other."""

from __future__ import annotations

import json
from functools import cache

import numpy as np

from .mutate import damaged_bytes, damaged_document, damaged_npy, json_bytes, odd_shape
from .target import Target, example_sketch, saved


class FlowerReading(Target):
    """A reading from a client: its form as JSON text, a newline, its bytes."""

    name = "flower-reading"
    needs = ("flwr",)
    imports = ("fedcohort.flower.wire",)

    def examples(self):
        from fedcohort.flower.wire import pack

        out = []
        for reading in (np.float64(0.5), np.arange(5.0), example_sketch().reading()):
            data, form = pack(reading)
            out.append(form.encode() + b"\n" + data)
        return out

    def damaged(self, data, rng):
        form, _, content = data.partition(b"\n")
        if rng.random() < 0.2:  # a shape of zeros and extremes, which may need no bytes
            form = json_bytes([json.loads(form)[0], odd_shape(rng)])
            return form + b"\n" + rng.choice([b"", content])
        if rng.random() < 0.7:
            return damaged_document(form, rng).replace(b"\n", b"") + b"\n" + content
        return form + b"\n" + damaged_bytes(content, rng)

    def parse(self):
        from fedcohort.flower.wire import unpack

        form, _, content = self.path.read_bytes().partition(b"\n")
        reading = unpack(content, form.decode("utf-8", "replace"), 1 << 20)
        from fedcohort.signals.table import Signals

        Signals().record("reading", {"client": reading}, 0)


class FlowerRequest(Target):
    name = "flower-request"
    needs = ("flwr",)
    imports = ("fedcohort.flower.wire",)

    def examples(self):
        from fedcohort.flower.wire import Request

        options = {"race_sketch": {"rows": 10, "bits": 4, "seed": 0}, "model_sketch": {"k": 8}}
        request = Request(0, 0, "v", signals=("loss", "race_sketch"), options=options)
        return [request.to_json().encode()]

    def damaged(self, data, rng):
        return damaged_document(data, rng)

    def parse(self):
        from fedcohort.flower.wire import Request

        request = Request.from_json(self.path.read_bytes().decode("utf-8", "replace"))
        request.to_json()


class FlowerUpdate(Target):
    """A model from a client, as bytes of an .npy file in an Array that states its form."""

    name = "flower-update"
    needs = ("flwr",)
    imports = ("fedcohort.flower.wire",)

    def examples(self):
        return [saved(lambda path: np.save(path, np.ones((3, 2), np.float32)), "x.npy")]

    def damaged(self, data, rng):
        return damaged_npy(data, rng)

    def parse(self):
        from flwr.app import Array, ArrayRecord

        from fedcohort.flower.wire import checked

        good = good_update()["w"]
        bad = Array(good.dtype, good.shape, good.stype, self.path.read_bytes())
        checked(ArrayRecord({"w": bad}), good_update())


@cache
def good_update():
    """Return a model that nobody changes."""
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({"w": Array(np.ones((3, 2), np.float32))})
