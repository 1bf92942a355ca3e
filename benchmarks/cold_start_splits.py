"""Who is warm, who is cold, what each is tested on, and how its data are sketched."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcohort.datasets import federate
from fedcohort.rounds import stream
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Transform


@dataclass(frozen=True)
class Split:
    """Rows of the training and the test set by client."""

    warm: dict
    cold: dict
    warm_test: list
    cold_test: list


def make_split(dataset, name, clients, cold, seed):
    rng = stream(seed, "cold-start")
    if name == "natural":
        return _natural(dataset, clients, cold, seed, rng)
    cold = cold or clients // 2
    halves = {"twins": _twins, "no twins": _without_twins}[name]
    warm, cold = halves(dataset, clients, cold, seed, rng)
    return Split(warm, cold, _by_class(dataset, warm), _by_class(dataset, cold))


def _twins(dataset, clients, cold, seed, rng):
    """Two classes a client; each cold client shares a warm client's classes, not its samples."""
    parts = federate(dataset, "skewness", clients=clients - cold, seed=seed, xi="H").parts
    warm, twins = {}, {}
    for client, rows in parts.items():
        mixed = rng.permutation(rows)
        warm[client], twins[client] = np.split(mixed, [len(mixed) // 2])
    chosen = list(twins)[:cold]
    return _sorted(warm), _sorted({client: twins[client] for client in chosen})


def _without_twins(dataset, clients, cold, seed, rng):
    """Two random classes a client; who has a twin among the warm is left to chance."""
    parts = federate(dataset, "skewness", clients=clients, seed=seed, xi="H").parts
    return _drawn(parts, cold, rng)


def _natural(dataset, clients, cold, seed, rng):
    federation = federate(dataset, "natural", clients=clients, seed=seed)
    tests = federation.test_parts()
    parts = {c: rows for c, rows in federation.parts.items() if c in tests}
    warm, cold = _drawn(parts, cold or len(parts) // 2, rng)
    return Split(warm, cold, [tests[c] for c in warm], [tests[c] for c in cold])


def _drawn(parts, cold, rng):
    names = list(parts)
    chosen = {names[i] for i in rng.choice(len(names), cold, replace=False)}
    warm = {c: rows for c, rows in parts.items() if c not in chosen}
    return _sorted(warm), _sorted({c: parts[c] for c in parts if c in chosen})


def _sorted(parts):
    return {client: np.sort(rows) for client, rows in parts.items()}


def _by_class(dataset, parts):
    """All test samples of the client's classes, which it has in about equal shares."""
    return [
        np.flatnonzero(np.isin(dataset.y_test, np.unique(dataset.y[rows])))
        for rows in parts.values()
    ]


def sketcher(dataset, rows, bits, seed):
    """Return a function from rows of the training set to their sketch, without labels."""
    if dataset.name == "shakespeare":
        empty = RaceSketch.minhash(rows=rows, buckets=2**bits, seed=seed)
        prepare = trigrams
    else:
        center = Transform(center=round(float(dataset.x.mean()), 2))
        dim = int(np.prod(dataset.sample_shape))
        empty = RaceSketch.srp(dim, rows=rows, bits=bits, seed=seed, transform=center)
        prepare = np.asarray

    def sketch(positions):
        made = empty.empty_like()
        made.add(prepare(dataset.x[positions]))
        return made

    return sketch


def trigrams(windows):
    """Token sets as a sparse matrix: the runs of three characters in each window."""
    from scipy.sparse import csr_matrix

    codes = windows[:, :-2] * 6400 + windows[:, 1:-1] * 80 + windows[:, 2:]
    ends = np.arange(0, codes.size + 1, codes.shape[1])
    made = csr_matrix((np.ones(codes.size, np.int8), codes.ravel(), ends), (len(codes), 80**3))
    made.sum_duplicates()
    return made
