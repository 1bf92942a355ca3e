"""What a person writes: experiments, sketch specs, availability traces, policies."""

from __future__ import annotations

import contextlib
import csv
import io
import json

import numpy as np

from fedcohort.exceptions import FedcohortError

from .mutate import damaged_bytes, damaged_text, odd
from .target import Target


class Toml(Target):
    name, file = "toml", "x.toml"
    imports = ("fedcohort.experiments.compare",)

    def examples(self):
        return [
            b"rounds = 3 \ncohort_size = 2 \nseeds = [ 0 , 1 ] \ntarget = 0.5 \n"
            b'[policy] \nname = "oort" \n[policy.options] \npreferred = 10.0 \n'
            b'[data] \ndataset = "digits" \npartition = "shards" \nclients = 6 \n'
            b"[data.options] \nper_client = 2 \n[local] \nlr = 0.1 \nepochs = 1 \n"
            b'[sweep] \n"local.lr" = [ 0.1 , 0.2 ] \n'
        ]

    def damaged(self, data, rng):
        return damaged_text(data, rng)

    def parse(self):
        from fedcohort.experiments import compare

        compare.read(self.path)


class SketchSpec(Target):
    name, file = "sketch-spec", "spec.toml"
    imports = ("fedcohort.files.spec",)

    def examples(self):
        return [
            b'[sketch] \nhash = "srp" \nrows = 20 \nbits = 4 \nseed = 0 \n'
            b'[privacy] \nepsilon = 1.0 \ndelta = 0.0 \nneighbors = "replace" \n'
            b'[missing] \nnull_values = [ "?" , "NA" ] \n'
            b'[columns.age] \nkind = "number" \ncenter = 50.0 \nscale = 10.0 \n'
            b'[columns.sex] \nkind = "category" \nlevels = [ "f" , "m" ] \n'
        ]

    def damaged(self, data, rng):
        return damaged_text(data, rng)

    def parse(self):
        from fedcohort.files.spec import load_spec

        load_spec(self.path)


class Trace(Target):
    name, file = "trace", "x.csv"
    imports = ("fedcohort.simulate.clock",)

    def examples(self):
        out = io.StringIO()
        csv.writer(out).writerows([("round", "client"), (0, "a"), (0, "b"), (1, "a")])
        return [out.getvalue().encode()]

    def damaged(self, data, rng):
        return damaged_bytes(data, rng)

    def parse(self):
        from fedcohort.simulate.clock import Trace as Availability

        trace = Availability.read(self.path)
        rng = np.random.default_rng(0)
        for number in range(6):
            trace.available(number, ("a", "b"), rng)


class Policy(Target):
    """Policies as on the command line: ``name:option=value,option=value``."""

    name = "policy"
    imports = ("fedcohort.policies",)

    def examples(self):
        import inspect

        from fedcohort import POLICIES

        out = []
        for name, policy in POLICIES.items():
            for option, parameter in inspect.signature(policy).parameters.items():
                out.append(f"{name}:{option}= {parameter.default}".encode())
        return out

    def damaged(self, data, rng):
        new = odd(rng)
        head, _, value = data.partition(b" ")
        if rng.random() < 0.8:
            with contextlib.suppress(ValueError):
                text = new if isinstance(new, str) else json.dumps(new)
                value = text.encode("utf-8", "surrogatepass")
        else:
            value = damaged_bytes(value, rng)
        return head + value

    def parse(self):
        from fedcohort import POLICIES
        from fedcohort.registry import make
        from fedcohort.session import Session

        text = self.path.read_bytes().decode("utf-8", "surrogateescape")
        policy = make("policy", text, POLICIES)
        session = Session(policy, cohort_size=2, seed=0)
        with contextlib.suppress(FedcohortError):
            session.begin(["a", "b", "c"], lambda signal, clients: {})
