"""Sketches of embeddings: by a function, by a public model, by the model in training."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcohort import storage
from fedcohort.datasets import federate, load
from fedcohort.exceptions import ConfigError
from fedcohort.policies import SketchMatch
from fedcohort.simulate import Simulation, Trace, build, embedding_of
from fedcohort.simulate.clients import PUBLIC
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Transform

DIGITS = load("digits")
CLIENTS = federate(DIGITS, "shards", clients=12, seed=0)
MODEL = build("mlp-64-30", DIGITS.sample_shape, 10, seed=0)


def simulation(policy: SketchMatch, **options) -> Simulation:
    return Simulation(CLIENTS, MODEL, policy, cohort_size=3, device="cpu", **options)


def by_hand(vectors, public, client: str) -> np.ndarray:
    """Counts of one client's sketch, made with the public interface of sketches."""
    step = Transform(center=public.mean(axis=0), unit=True, classes=10, label_weight=2.0)
    sketch = RaceSketch.srp(vectors.shape[1], 10, 6, 0, transform=step)
    sketch.add(vectors, DIGITS.y[CLIENTS.parts[client]])
    return sketch.counts


def expected(embed, client: str) -> np.ndarray:
    vectors = np.asarray(embed(DIGITS.x[CLIENTS.parts[client]]), np.float32)
    return by_hand(vectors, np.asarray(embed(DIGITS.x_test[:PUBLIC]), np.float32), client)


def counts(made: Simulation, client: str) -> np.ndarray:
    return made.sessions[0].signals.values("race_sketch", (client,))["counts"][0]


def halves(x):
    flat = x.reshape(len(x), -1)
    return flat[:, :32] - flat[:, 32:]


def test_a_function_embeds_before_sketching() -> None:
    made = simulation(SketchMatch(), embed=halves)
    made.step()
    for client in ("client-00", "client-07"):
        assert (counts(made, client) == expected(halves, client)).all()


def test_a_public_module_is_its_feature_layer() -> None:
    public = build("mlp-64-30", DIGITS.sample_shape, 10, seed=9)
    made = simulation(SketchMatch(), embed=embedding_of(public))
    made.step()
    assert (counts(made, "client-03") == expected(embedding_of(public), "client-03")).all()
    first = public.fc1(torch.from_numpy(DIGITS.x[:2]).flatten(1)).detach().numpy()
    assert embedding_of(public)(DIGITS.x[:2]) == pytest.approx(first, abs=1e-6)


def test_the_current_model_embeds_anew_at_every_refresh() -> None:
    """Who is away at the refresh, or joins later, is sketched by the model of that refresh."""
    names = CLIENTS.clients
    there = {1: names[:10], 3: names[1:10], 4: names}  # one is away at the refresh, two join
    made = simulation(SketchMatch(embed="model", refresh=2), availability=Trace(there))
    made.step()
    assert (counts(made, names[0]) == expected(embedding_of(MODEL), names[0])).all()
    made.step()
    second = embedding_of(made.model())
    made.step()
    assert (counts(made, names[0]) == expected(embedding_of(MODEL), names[0])).all()
    made.step()
    for client in (names[0], names[5], names[11]):
        assert (counts(made, client) == expected(second, client)).all()


def test_the_model_that_embeds_is_paid_for() -> None:
    size = made_bytes(SketchMatch(embed="model")) - made_bytes(SketchMatch())
    assert size == (12 - 3) * sum(4 * p.numel() for p in MODEL.parameters())  # the cohort: once


def made_bytes(policy: SketchMatch) -> int:
    made = simulation(policy)
    made.step()
    return made.sessions[0].ledger.total("down", 0) - 3 * made.sessions[0].model_bytes


def test_a_resumed_run_keeps_the_model_that_embeds(tmp_path) -> None:
    policy = SketchMatch(embed="model", refresh=2)
    there = Trace({1: CLIENTS.clients[:8], 4: CLIENTS.clients})
    options = {"cohort_size": 3, "availability": there, "device": "cpu"}
    whole, resumed = (Simulation(CLIENTS, MODEL, policy, **options) for _ in range(2))
    records = [whole.step() for _ in range(3)]
    storage.save(tmp_path / "run", whole.state_dict())
    resumed.load_state_dict(storage.load(tmp_path / "run"))
    assert len(records) == 3
    for _ in range(2):
        assert resumed.step() == whole.step()


def test_every_release_has_noise_of_its_own() -> None:
    """The difference of two private sketches of the same data must not be exact."""
    made = simulation(SketchMatch(epsilon=1.0, refresh=1))
    made.step()
    first = counts(made, "client-00").copy()
    made.step()
    assert (counts(made, "client-00") != first).mean() > 0.5


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="embed='own'"):
        SketchMatch(embed="own")
    with pytest.raises(ConfigError, match="one vector per sample"):
        simulation(SketchMatch(), embed=lambda x: x).step()
