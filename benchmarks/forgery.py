"""What liars get: places under every policy and uploads under every gate, by the best attack.

    python benchmarks/forgery.py --out benchmarks/results/forgery.json
    python benchmarks/forgery.py --seeds 5 --accuracy 60 --jobs 12 --out forgery.json

No model is trained: honest clients report readings of a made-up federation (sketches of 20 kinds of
clients, sizes, losses that fall over time and with participation), liars report what an attack
says. Attacks are constant lies, tried for every policy that reads the signal; the largest share of
places counts. Readings outside a signal's declared range are dropped by the session, so lies stay
inside it. The fair share of one liar is cohort / clients = .05 of a cohort each round, which is .01
of all places; a share of 1 means a place in every cohort. `bounded` is `Bounded(policy)`.

Clients that fail: ten of the clients do not finish, in any round or in the first quarter of the
rounds. Their mean share of cohorts over all rounds and in the second half, beside that of the same
clients when nobody fails.

Gates: of a cohort of ten, one or three clients answer falsely in every round. The share of honest
clients' uploads without liars, and the lowest and highest share that a constant lie can cause.

`--accuracy` adds what the bounds cost when nobody lies: accuracy on digits with two labels per
client, with and without bounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import numpy as np
from provenance import write

from fedcohort import POLICIES, Session
from fedcohort.gates import GATES
from fedcohort.policies import Bounded
from fedcohort.rounds import stream
from fedcohort.signals.projection import Vectors
from fedcohort.sketch.race import RaceSketch

CLIENTS, COHORT = 100, 5
VECTORS = ("feature_profile", "model_sketch", "gradient_sketch", "update_sketch", "insight")
VECTORS += ("bias_update",)
KINDS, LABELS = 20, 10


class Federation:
    """Honest readings: functions of the client, the round and how often it trained."""

    def __init__(self, options, seed):
        self.options, self.seed = options, seed
        self.ids = [f"c{i:03d}" for i in range(CLIENTS)]
        self.trained = Counter()
        self.empty = None

    def kind(self, client):
        return int(client[1:]) % KINDS

    def reading(self, signal, client, number):
        rng = stream(self.seed, "reading", signal, client)
        if signal == "num_examples":
            return np.int64(rng.integers(50, 500))
        if signal in ("loss", "loss_rms"):
            start = 1.5 + rng.random()
            fresh = 0.8 ** min(self.trained[client], 10)
            noise = 1 + 0.05 * stream(self.seed, signal, client, number).normal()
            return np.float64(max((0.2 + start * np.exp(-number / 100) * fresh) * noise, 1e-3))
        if signal == "duration":
            return np.float64(10 * np.exp(0.5 * rng.normal()))
        if signal == "update_distance":
            return np.float64(1 + 0.2 * stream(self.seed, signal, client, number).normal() ** 2)
        if signal == "label_histogram":
            counts = np.zeros(LABELS, np.int64)
            own = [self.kind(client) % LABELS, (self.kind(client) + 3) % LABELS]
            counts[own] = rng.integers(25, 250, 2)
            return counts
        if signal == "race_sketch":
            return self.sketch(client, rng.integers(50, 500)).reading()
        k = int(self.options.get(signal, {}).get("k", 50)) or 50
        center = stream(self.seed, "kind", self.kind(client)).normal(size=k)
        return (center + 0.3 * rng.normal(size=k)).astype(np.float32)

    def sketch(self, client, n, spread=0.5):
        options = self.options["race_sketch"]
        rows, bits = int(options.get("rows", 10)), int(options.get("bits", 6))
        empty = RaceSketch.srp(dim=8, rows=rows, bits=bits, seed=0)
        rng = stream(self.seed, "data", client)
        center = stream(self.seed, "kind", self.kind(client)).normal(size=8)
        empty.add(center + spread * rng.normal(size=(int(n), 8)))
        return empty


def scaled(factor):
    return lambda value, honest, rng: np.asarray(value * factor, value.dtype)


def constant(number):
    return lambda value, honest, rng: np.asarray(number, value.dtype)


def far_sketch(value, honest, rng):
    """All records in one random bucket per row: as far from everybody as a sketch can be."""
    out = value.copy()
    counts = np.zeros_like(out["counts"])
    counts[np.arange(counts.shape[0]), rng.integers(0, counts.shape[1], counts.shape[0])] = 400
    out["counts"], out["n"] = counts, 400.0
    return out


def noisy_sketch(value, honest, rng):
    """An honest sketch that claims much noise."""
    out = value.copy()
    out["noise"] = 1e4
    return out


def big_sketch(value, honest, rng):
    """An honest sketch that claims many records."""
    out = value.copy()
    wide = np.zeros((), [("n", "f8"), ("noise", "f8"), ("counts", "i8", out["counts"].shape)])
    wide["n"], wide["counts"] = float(out["n"]) * 1e6, out["counts"].astype(np.int64) * 10**6
    return wide


def silent(value, honest, rng):
    return None


#: Lies by signal.
ATTACKS = {
    "loss": {
        "huge": constant(1e6),
        "ten times": scaled(10.0),
        "zero": constant(1e-9),
        "none": silent,
    },
    "loss_rms": {"huge": constant(1e6), "ten times": scaled(10.0), "none": silent},
    "duration": {"fast": constant(1e-6), "none": silent},
    "num_examples": {"2^40": constant(2**40), "2^20": constant(2**20), "one": constant(1)},
    "race_sketch": {"far": far_sketch, "noisy": noisy_sketch, "big": big_sketch, "none": silent},
    "update_distance": {"zero": constant(0.0), "huge": constant(1e6), "none": silent},
}
ATTACKS["label_histogram"] = {
    "even": lambda value, honest, rng: np.full_like(value, 50),
    "even, many": lambda value, honest, rng: np.full_like(value, 10**6),
    "one label": lambda value, honest, rng: np.where(np.arange(len(value)) == 9, 300, 0),
    "one record": lambda value, honest, rng: np.where(np.arange(len(value)) == 9, 1, 0),
    "none": silent,
}
for vector in VECTORS:
    ATTACKS[vector] = {
        "outlier": lambda value, honest, rng: (rng.normal(size=value.shape) * 30).astype("f4"),
        "huge": lambda value, honest, rng: (rng.normal(size=value.shape) * 1e6).astype("f4"),
        "zero": constant(0.0),
        "none": silent,
    }


def needed(policy):
    needs = policy.needs
    return sorted({*needs.profile, *needs.query, *needs.reply})


def share(make, liars, signal, lie, *, rounds, seed, failing=0, first=0):
    """Return the liars' places, per liar and cohort, from round `first` on.

    In the first `failing` rounds they do not finish.
    """
    policy = make()
    federation = Federation(policy.signal_options, seed)
    session = Session(policy, cohort_size=COHORT, seed=seed)
    lying = set(federation.ids[7 : 7 + liars])

    def answer(name, client):
        value = federation.reading(name, client, session.round_number)
        if client in lying and name == signal:
            return lie(value, federation, stream(seed, "lie", client))
        return value

    got = 0
    for _ in range(rounds):
        cohort = session.begin(
            federation.ids, lambda name, clients: {c: answer(name, c) for c in clients}
        ).clients
        got += len(lying & set(cohort)) if session.round_number >= first else 0
        failed = lying if session.round_number < failing else set()
        finished = [c for c in cohort if c not in failed]
        federation.trained.update(finished)
        replies = {
            name: {c: answer(name, c) for c in finished} for name in session.policy.needs.reply
        }
        session.finish(replies, finished)
    return got / (rounds - first) / min(liars, COHORT)


def measure_failing(name, rounds, seeds):
    """Return the mean share of cohorts of ten clients that fail, always or for a while."""

    def mean(**how):
        shares = [
            share(POLICIES[name], 10, None, None, rounds=rounds, seed=s, **how) for s in seeds
        ]
        return float(np.mean(shares)) * COHORT / 10

    half = rounds // 2
    return [
        {
            "policy": name,
            "fair share": COHORT / CLIENTS,
            "healthy": mean(),
            "never finish": mean(failing=rounds),
            "healthy, second half": mean(first=half),
            "recovered, second half": mean(failing=rounds // 4, first=half),
        }
    ]


def measure(name, rounds, seeds):
    """Return the best attack on a policy, without and with bounds."""
    rows = []
    for bounded in (False, True):
        make = POLICIES[name] if not bounded else lambda: Bounded(POLICIES[name]())
        for liars in (1, 10):
            found = {}
            for signal in needed(POLICIES[name]()):
                for attack, lie in ATTACKS.get(signal, {}).items():
                    shares = [share(make, liars, signal, lie, rounds=rounds, seed=s) for s in seeds]
                    found[f"{signal}: {attack}"] = float(np.mean(shares))
            honest = [share(make, liars, None, None, rounds=rounds, seed=s) for s in seeds]
            found["honest"] = float(np.mean(honest))
            best = max(found, key=found.get)
            rows.append(
                {
                    "policy": name,
                    "bounded": bounded,
                    "liars": liars,
                    "best attack": best,
                    "share": found[best],
                    "fair share": liars * COHORT / CLIENTS / min(liars, COHORT),
                    "attacks": found,
                }
            )
    return rows


ANSWERS = {"zero": 0, "one": 1, "small": 1e-6, "large": 100, "huge": 1e30, "not a number": np.nan}


def uploads(name, liars, lie, *, rounds, seed, cohort=10, dim=200):
    """Return the share of honest clients that a gate asks for their models."""
    gate, rng = GATES[name](), stream(seed, "gate")
    ids = [f"c{i}" for i in range(cohort)]
    model, local = np.zeros(dim), np.zeros((cohort, dim))
    spread = np.linspace(0.05, 0.5, cohort)[:, None]  # clients differ in how noisy their steps are
    asked_honest = 0
    for number in range(rounds):
        step = np.exp(-number / rounds) * (0.1 + spread * rng.normal(size=(cohort, dim)))
        local = local + step
        announced = gate.announce(Vectors(model))
        answers = gate.probe(announced, Vectors(model), Vectors(model + local))
        given = dict(zip(ids, answers, strict=True))
        for client in ids[:liars] if lie is not None else ():
            with np.errstate(all="ignore"):
                given[client] = np.full_like(given[client], np.asarray(lie).astype(answers.dtype))
        asked = gate.decide(given)
        asked_honest += len(set(asked) - set(ids[:liars]))
        if asked:
            after = model + local[[ids.index(c) for c in asked]].mean(0)
            gate.aggregated(Vectors(model), Vectors(after))
            model, local = after, np.zeros((cohort, dim))
    return asked_honest / rounds / (cohort - liars)


def measure_gate(name, rounds, seeds):
    """Return how far liars move the honest clients' uploads."""
    rows = []
    for liars in (1, 3):
        tried = {
            label: float(np.mean([uploads(name, liars, lie, rounds=rounds, seed=s) for s in seeds]))
            for label, lie in {"honest": None, **ANSWERS}.items()
        }
        lowest, highest = min(tried, key=tried.get), max(tried, key=tried.get)
        rows.append(
            {
                "gate": name,
                "liars": liars,
                "honest": tried["honest"],
                "lowest": [lowest, tried[lowest]],
                "highest": [highest, tried[highest]],
                "attacks": tried,
            }
        )
    return rows


def accuracy(name, rounds, seeds, device):
    """Accuracy of one policy without liars, with and without bounds."""
    import torch

    from fedcohort.datasets import federate, load
    from fedcohort.simulate import LocalTraining, build, simulate

    torch.set_num_threads(1)
    data = load("digits")
    local = LocalTraining(epochs=5, batch_size=8, lr=0.05)
    out = []
    for bounded in (False, True):
        final = []
        for seed in seeds:
            policy = POLICIES[name]()
            histories = simulate(
                federate(data, "shards", clients=60, seed=seed, per_client=2),
                build("mlp-64-30", data.sample_shape, data.classes, seed=seed),
                Bounded(policy) if bounded else policy,
                cohort_size=5,
                rounds=rounds,
                local=local,
                seeds=[seed],
                device=device,
            )
            final.append(float(np.nanmean(histories[0].accuracy[-10:])))
        out.append({"policy": name, "bounded": bounded, "accuracy": final})
    return out


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds [3]")
    parser.add_argument("--policies", nargs="+", default=sorted(POLICIES))
    parser.add_argument("--accuracy", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--device", default="cpu", help="of the training for --accuracy [cpu]")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time [1]")
    parser.add_argument("--out")
    args = parser.parse_args()
    seeds = range(args.seeds)
    result = {"clients": CLIENTS, "cohort": COHORT, "rounds": args.rounds, "seeds": args.seeds}
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        places = pool.map(partial(measure, rounds=args.rounds, seeds=seeds), args.policies)
        failing = pool.map(partial(measure_failing, rounds=args.rounds, seeds=seeds), args.policies)
        gates = pool.map(partial(measure_gate, rounds=args.rounds, seeds=seeds), sorted(GATES))
        trained = pool.map(
            partial(accuracy, rounds=args.accuracy, seeds=seeds, device=args.device),
            args.policies if args.accuracy else (),
        )
        tables = {"rows": places, "failing": failing, "gates": gates, "accuracy": trained}
        for key, parts in tables.items():
            result[key] = []
            for part in parts:
                result[key] += part
                print(json.dumps(part), file=sys.stderr, flush=True)
    if args.out:
        write(args.out, result)


if __name__ == "__main__":
    main()
