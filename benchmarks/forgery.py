"""What liars get: places under every policy, by the best attack of a search.

    python benchmarks/forgery.py --policies hics-fl oort --jobs 2 --out some.json

No model is trained: honest clients report readings of a made-up federation (sketches of 20 kinds of
clients, sizes, losses that fall over time and with participation), liars report what an attack
says: one lie, or the truth, for each signal that the policy reads. All products are tried with one
seed for 60 rounds, and the best 4 are played for all rounds with all seeds; the worst of these is
published. The session drops readings outside a signal's declared range, so lies stay inside it. The
fair share of one liar is .05 of a cohort each round; 1 is a place in every cohort. `bounded` is
`Bounded(policy)`; `renamed` are liars who come back under a new name each round.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import product
from multiprocessing import get_context

import numpy as np
from provenance import write
from script import arguments

from fedcohort import POLICIES, Session
from fedcohort.policies import Bounded
from fedcohort.rounds import stream
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

    def kind(self, client):
        return int(client[1:]) % KINDS

    def reading(self, signal, client, number):
        rng = stream(self.seed, "reading", signal, client)
        if signal == "num_examples":
            return np.int64(rng.integers(50, 500))
        now = stream(self.seed, signal, client, number)
        if signal in ("loss", "loss_rms"):
            left = np.exp(-number / 100) * 0.8 ** min(self.trained[client], 10)
            loss = (0.2 + (1.5 + rng.random()) * left) * (1 + 0.05 * now.normal())
            return np.float64(max(loss, 1e-3))
        if signal == "duration":
            return np.float64(10 * np.exp(0.5 * rng.normal()))
        if signal == "update_distance":
            return np.float64(1 + 0.2 * now.normal() ** 2)
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

    def sketch(self, client, n):
        options = self.options["race_sketch"]
        sketch = RaceSketch.srp(
            8, rows=options.get("rows", 10), bits=options.get("bits", 6), seed=0
        )
        center = stream(self.seed, "kind", self.kind(client)).normal(size=8)
        noise = stream(self.seed, "data", client).normal(size=(int(n), 8))
        sketch.add(center + 0.5 * noise)
        return sketch


def constant(number):
    return lambda value, others, rng: np.full_like(value, number)


def scaled(factor):
    return lambda value, others, rng: np.asarray(value * factor, value.dtype)


def average(value, others, rng):
    """What the others report on average."""
    if value.dtype.names is None:
        return np.mean(others, axis=0).astype(value.dtype)
    out, shares = value.copy(), np.mean([o["counts"] / o["n"] for o in others], axis=0)
    ends = np.rint(400 * np.cumsum(shares, axis=1)).astype(np.int64)  # so that each row sums to n
    out["n"], out["noise"], out["counts"] = 400, 0, np.diff(ends, axis=1, prepend=0)
    return out


def rarest(value, others, rng):
    """What the client farthest from the average reports."""
    rows = [o["counts"] / o["n"] if value.dtype.names else np.asarray(o, float) for o in others]
    gaps = [np.linalg.norm(row - np.mean(rows, axis=0)) for row in rows]
    return others[int(np.argmax(gaps))].astype(value.dtype)


def far_sketch(value, others, rng):
    """All records in one random bucket per row: as far from everybody as a sketch can be."""
    out = value.copy()
    rows, buckets = out["counts"].shape
    out["n"], out["counts"] = 400.0, 0
    out["counts"][np.arange(rows), rng.integers(0, buckets, rows)] = 400
    return out


def noisy_sketch(value, others, rng):
    """An honest sketch that claims much noise."""
    out = value.copy()
    out["noise"] = 1e4
    return out


def big_sketch(value, others, rng):
    """An honest sketch that claims many records."""
    wide = np.zeros((), [("n", "f8"), ("noise", "f8"), ("counts", "i8", value["counts"].shape)])
    wide["n"], wide["counts"] = float(value["n"]) * 1e6, value["counts"].astype(np.int64) * 10**6
    return wide


def outlier(length):
    return lambda value, others, rng: (length * rng.normal(size=value.shape)).astype(value.dtype)


def changing(value, others, rng):
    """Another plausible number each time."""
    return np.asarray(rng.uniform(0.1, 10) * value, value.dtype)


def silent(value, others, rng):
    return None


#: Lies by signal; the truth is tried with each of them.
SIZES = {"2^40": constant(2**40), "one": constant(1), "none": silent}
NUMBERS = {"huge": constant(1e6), "ten times": scaled(10.0), "tiny": constant(1e-9)}
NUMBERS |= {"average": average, "random": changing, "none": silent}
ROWS = {"outlier": outlier(30), "huge": outlier(1e6), "zero": constant(0.0), "tiny": scaled(1e-6)}
ROWS |= {"average": average, "rarest": rarest, "none": silent}
LIES = {"num_examples": SIZES, "duration": {"fast": constant(1e-6), "none": silent}}
LIES |= dict.fromkeys(("loss", "loss_rms", "update_distance", "gradient_spread"), NUMBERS)
LIES |= dict.fromkeys(VECTORS, ROWS)
LIES["race_sketch"] = {"far": far_sketch, "noisy": noisy_sketch, "big": big_sketch}
LIES["race_sketch"] |= {"average": average, "rarest": rarest, "none": silent}
LIES["label_histogram"] = {
    "even": constant(50),
    "even, many": constant(10**6),
    "one record": lambda value, others, rng: (np.arange(len(value)) == 9).astype(value.dtype),
    "average": average,
    "rarest": rarest,
    "none": silent,
}


def needed(policy):
    needs = policy.needs
    return sorted({*needs.profile, *needs.query, *needs.reply})


def attacks(policy):
    """Every product of one lie or the truth per signal, by name; the truth alone is not among."""
    signals = [signal for signal in needed(policy) if signal in LIES]
    for names in product(*([None, *LIES[signal]] for signal in signals)):
        told = {signal: name for signal, name in zip(signals, names, strict=True) if name}
        if told:
            words = ", ".join(f"{signal}: {name}" for signal, name in told.items())
            yield words, {signal: LIES[signal][name] for signal, name in told.items()}


def share(make, liars, lies, *, rounds, seed, renamed=False):
    """Return the liars' places, per liar and cohort."""
    policy = make()
    federation = Federation(policy.signal_options, seed)
    session = Session(policy, cohort_size=COHORT, seed=seed)
    lying = set(federation.ids[7 : 7 + liars])

    @cache
    def honest(name, number):
        return [federation.reading(name, c, number) for c in federation.ids[30:60]]

    def answer(name, client):
        origin, number = client.split("'")[0], session.round_number
        value = federation.reading(name, origin, number)
        if origin not in lying or name not in lies:
            return value
        when = () if value.ndim or value.dtype.names else (number,)
        return lies[name](value, honest(name, number), stream(seed, "lie", origin, *when))

    got = 0
    for number in range(rounds):
        fresh = {c: f"{c}'{number}" if renamed and c in lying else c for c in federation.ids}
        cohort = session.begin(
            list(fresh.values()), lambda name, clients: {c: answer(name, c) for c in clients}
        ).clients
        got += len({fresh[c] for c in lying} & set(cohort))
        federation.trained.update(c.split("'")[0] for c in cohort)
        replies = {name: {c: answer(name, c) for c in cohort} for name in policy.needs.reply}
        session.finish(replies, cohort)
    told = {name for name, lie in lies.items() if lie is not silent}
    for name in session.signals.dropped.keys() & told:
        raise AssertionError(f"a lie about {name} was dropped before it was tried")
    return got / rounds / min(liars, COHORT)


def measure(name, rounds, seeds):
    """Return the best attack on a policy, without and with bounds, and under new names."""
    rows, tried = [], dict(attacks(POLICIES[name]()))
    for liars, (bounded, renamed) in product((1, 10), product((False, True), repeat=2)):
        make = POLICIES[name] if not bounded else lambda: Bounded(POLICIES[name]())

        def mean(attack, rounds, seeds, make=make, liars=liars, renamed=renamed):
            how = {"rounds": rounds, "renamed": renamed}
            lies = tried.get(attack, {})
            return float(np.mean([share(make, liars, lies, seed=s, **how) for s in seeds]))

        best = sorted(tried, key=lambda attack: mean(attack, 60, seeds[:1]))[-4:]
        shares = {attack: mean(attack, rounds, seeds) for attack in (*best, "honest")}
        worst = max(shares, key=shares.get)
        row = {"policy": name, "bounded": bounded, "renamed": renamed, "liars": liars}
        row |= {"tried": len(tried), "best attack": worst, "share": shares[worst]}
        row["fair share"] = liars * COHORT / CLIENTS / min(liars, COHORT)
        rows.append(row | {"attacks": shares})
    return rows


def main():
    args = arguments(__doc__, rounds=200, seeds=3, policies=sorted(POLICIES), jobs=1, out=str)
    seeds = range(args.seeds)
    result = {"clients": CLIENTS, "cohort": COHORT, "rounds": args.rounds, "seeds": args.seeds}
    result["rows"] = []
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for rows in pool.map(partial(measure, rounds=args.rounds, seeds=seeds), args.policies):
            result["rows"] += rows
            print(json.dumps(rows), file=sys.stderr, flush=True)
    if args.out:
        write(args.out, result)


if __name__ == "__main__":
    main()
