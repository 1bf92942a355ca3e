"""What simulated clients sketch: inputs, tokens, embeddings by a function or a model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fedcohort import storage
from fedcohort.datasets import federate, load
from fedcohort.datasets.base import Dataset
from fedcohort.exceptions import ConfigError
from fedcohort.policies import SketchMatch
from fedcohort.simulate import Simulation, Trace, build, embedding_of
from fedcohort.simulate.clients import PUBLIC
from fedcohort.sketch.distances import distance_matrix
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Transform

DIGITS = load("digits")
CLIENTS = federate(DIGITS, "shards", clients=12, seed=0)
MODEL = build("mlp-64-30", DIGITS.sample_shape, 10, seed=0)


def simulation(policy, clients=CLIENTS, model=MODEL, **options):
    return Simulation(clients, model, policy, cohort_size=3, device="cpu", **options)


def expected(embed, client):
    """Counts of one client's sketch, made with the public interface of sketches."""
    vectors = np.asarray(embed(DIGITS.x[CLIENTS.parts[client]]), np.float32)
    public = np.asarray(embed(DIGITS.x_test[:PUBLIC]), np.float32)
    step = Transform(center=public.mean(axis=0), unit=True, classes=10, label_weight=2.0)
    sketch = RaceSketch.srp(vectors.shape[1], 10, 6, 0, transform=step)
    sketch.add(vectors, DIGITS.y[CLIENTS.parts[client]])
    return sketch.counts


def counts(run, client):
    return run.seeds[0].session.signals.values("race_sketch", (client,))["counts"][0]


def halves(x):
    flat = x.reshape(len(x), -1)
    return flat[:, :32] - flat[:, 32:]


PUBLIC_MODEL = build("mlp-64-30", DIGITS.sample_shape, 10, seed=9)


@pytest.mark.parametrize("embed", [halves, embedding_of(PUBLIC_MODEL)])
def test_a_function_embeds_before_sketching(embed):
    run = simulation(SketchMatch(), embed=embed)
    run.step()
    for client in ("client-00", "client-07"):
        assert (counts(run, client) == expected(embed, client)).all()
    first = PUBLIC_MODEL.fc1(torch.from_numpy(DIGITS.x[:2]).flatten(1)).detach().numpy()
    assert embedding_of(PUBLIC_MODEL)(DIGITS.x[:2]) == pytest.approx(first, abs=1e-6)
    with pytest.raises(ConfigError, match="one vector per sample"):
        simulation(SketchMatch(), embed=lambda x: x).step()


def test_the_current_model_embeds_anew_at_every_refresh(tmp_path):
    """Who is away at the refresh, or joins later, is sketched by the model of that refresh."""
    names = CLIENTS.clients
    there = Trace({1: names[:10], 3: names[1:10], 4: names})  # one is away at it, two join
    policy = SketchMatch(embed="model", refresh=2)
    run, resumed = (simulation(policy, availability=there) for _ in range(2))
    run.step()
    assert (counts(run, names[0]) == expected(embedding_of(MODEL), names[0])).all()
    run.step()
    second = embedding_of(run.model())
    run.step()
    assert (counts(run, names[0]) == expected(embedding_of(MODEL), names[0])).all()
    storage.save(tmp_path / "run", run.state_dict())
    resumed.load_state_dict(storage.load(tmp_path / "run"))
    assert resumed.step() == run.step()
    for client in (names[0], names[5], names[11]):
        assert (counts(run, client) == expected(second, client)).all()


def test_the_model_that_embeds_is_paid_for():
    def bytes_down(policy):
        run = simulation(policy)
        run.step()
        return run.seeds[0].session.ledger.total("down", 0)

    size = bytes_down(SketchMatch(embed="model")) - bytes_down(SketchMatch())
    assert size == (12 - 3) * sum(4 * p.numel() for p in MODEL.parameters())  # the cohort: once


def test_every_release_has_noise_of_its_own():
    """The difference of two private sketches of the same data must not be exact."""
    run = simulation(SketchMatch(epsilon=1.0, refresh=1))
    run.step()
    first = counts(run, "client-00").copy()
    run.step()
    assert (counts(run, "client-00") != first).mean() > 0.5


@pytest.mark.parametrize("hash", ["auto", "srp"])
def test_tokens_are_hashed_as_sets(hash):
    """Squared MMD between roles over that between halves of a role, which is 0 up to chance.

    Numbers hashed by angle, as all inputs were, do not tell roles apart this well.
    """
    rng = np.random.default_rng(0)
    laws = rng.dirichlet(np.full(60, 0.3), 4)  # each of four roles has favorite tokens
    x = np.concatenate([rng.choice(60, size=(200, 40), p=law) for law in laws])
    ids = np.repeat([f"{role}{half}" for role in range(4) for half in "ab"], 100)
    y = rng.integers(0, 60, len(x))
    dataset = Dataset("tokens", x, y, x[:200], y[:200], 60, ids, ids[:200], tokens=True)
    policy = SketchMatch(hash=hash, centered=False, label_weight=0.0)
    run = simulation(policy, federate(dataset, "natural"), build("char-lstm", (40,), 60))
    seed = run.seeds[0]
    readings = np.array(list(seed.collect("race_sketch", seed.clients).values()))
    far = distance_matrix(readings, "mmd")
    role = np.array([int(c[0]) for c in seed.clients])
    same = (role[:, None] == role) & ~np.eye(len(role), dtype=bool)
    apart = far[role[:, None] != role].mean() / max(np.abs(far[same]).mean(), 1e-9)
    assert apart > 10 if hash == "auto" else apart < 10
    if hash == "auto":  # whole numbers that nobody calls tokens may be amounts
        numbers = federate(dataclasses.replace(dataset, tokens=False), "natural")
        with pytest.raises(ConfigError, match="hash"):
            simulation(policy, numbers, build("char-lstm", (40,), 60)).step()
