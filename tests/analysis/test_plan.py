"""What a cohort is worth: closed forms against enumeration, cross-fitting, pure noise, the CLI."""

from __future__ import annotations

import tracemalloc
from itertools import combinations

import numpy as np
import pytest

import fedcohort
from fedcohort.analysis import plan as planning
from fedcohort.analysis.plan import BetweenClients, GainFit, Half, Trial, plan, shipped_fit
from fedcohort.exceptions import ConfigError
from fedcohort.signals.forms import sketch_dtype
from fedcohort.sketch import distances
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Transform


def federation(clients: int, kinds: int = 10, n: int = 300, noise: float = 0.0, seed: int = 0):
    """Clients of two of `kinds` kinds (all kinds if 0), 10 rows of 16 buckets."""
    rng = np.random.default_rng(seed)
    out = np.zeros(clients, sketch_dtype(10, 16, "i4"))
    bucket = rng.integers(0, 16, size=(10, 40))
    for one in out:
        own = rng.choice(kinds, 2, replace=False) if kinds else np.arange(40)
        records = rng.choice(own, n)
        for r in range(10):
            one["counts"][r] = np.bincount(bucket[r][records], minlength=16)
        one["counts"] += np.round(rng.laplace(scale=np.sqrt(noise / 2), size=(10, 16))).astype(int)
    out["n"], out["noise"] = n, noise
    return out


def test_a_cohort_is_judged_by_its_debiased_distance() -> None:
    """Naive recomputation in float64: D less the error of what the two do not share."""
    readings = federation(7)
    half = Half(readings, np.arange(7), np.arange(10) % 2 == 0)
    counts, n = readings["counts"][:, ::2], readings["n"]
    q = counts / n[:, None, None]
    share = np.full(7, 1 / 7)
    errors = (5 - (q**2).sum(axis=(1, 2))) / (n - 1)
    cohort = np.array([1, 4, 5])
    mix = np.zeros(7)
    mix[cohort] = share[cohort] / share[cohort].sum()
    gap = np.tensordot(mix - share, q, axes=1)
    expected = ((gap**2).sum() - (mix - share) ** 2 @ errors) / 5
    assert half.judge(cohort) == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_closed_form_is_the_mean_over_all_cohorts(k: int) -> None:
    readings = federation(7)
    whole = BetweenClients(readings)
    everything = Half(readings, np.arange(7), np.ones(10, bool))
    values = [everything.judge(np.array(c)) for c in combinations(range(7), k)]
    assert whole.uniform(k) == pytest.approx(np.mean(values), rel=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_pure_noise_has_nothing_to_gain(seed: int) -> None:
    """Equal clients with strong noise: judged by what it was chosen for, matching looks good."""
    readings = federation(100, kinds=0, n=100, noise=200.0, seed=seed)
    found = plan(readings, [5])
    assert not found.worthwhile and found.gain == {}
    assert found.verdict.startswith("Nothing to gain")


def test_cohorts_are_not_judged_by_what_they_were_chosen_for() -> None:
    """With noise, the chosen half flatters a cohort; the plan reports the other half."""
    readings = federation(100, n=100, noise=50.0)
    trial = Trial(readings, np.array([f"{i:03d}" for i in range(100)], object))
    cohorts = trial.cohorts(fedcohort.SketchMatch(), trial.halves[0], 5)
    chosen = np.mean([trial.halves[0].judge(c) for c in cohorts])
    judged = np.mean([trial.halves[1].judge(c) for c in cohorts])
    worth = plan(readings, [5]).worths[0]
    assert chosen < 0.5 * judged
    assert worth.discrepancy == pytest.approx(judged, rel=0.5)
    assert worth.discrepancy > 2 * abs(chosen)


def test_the_smallest_cohort_that_replaces_the_present_one() -> None:
    found = plan(federation(60), [5], present=6)
    size = found.smallest["sketch-match"]
    assert size is not None and size < 6
    smaller = [w for w in found.worths if w.cohort_size < size]
    assert all(w.random_clients < 6 for w in smaller)


def test_time_is_saved_where_slow_clients_hold_nothing_special() -> None:
    """Half of 40 clients are ten times slower; a round lasts as long as its slowest client."""
    names = [f"c{i:02d}" for i in range(40)]
    durations = {name: 100.0 if i % 2 else 10.0 for i, name in enumerate(names)}
    found = plan(federation(40), [5], names=names, durations=durations)
    plain, timed = found.worths
    some_slow = 1 - np.prod([(20 - i) / (40 - i) for i in range(5)])
    assert found.uniform_seconds[5] == pytest.approx(10 + 90 * some_slow, rel=0.05)
    assert 10 <= timed.seconds < 0.9 * plain.seconds  # 78.9 and 96.7
    assert timed.random_clients > 0.8 * plain.random_clients
    assert timed.policy == "sketch-match with time"
    assert any("s with sketch-match with time" in line for line in found.lines())
    assert plan(federation(40), [5], names=names).worths[0].seconds is None


def test_many_clients_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the sketches, a plan needs a fraction of their size and a part of the clients."""
    monkeypatch.setattr(planning, "MAX_CLIENTS", 100)
    monkeypatch.setattr(distances, "CHUNK", 1 << 16)  # a row at a time, as of a million clients
    readings = np.tile(federation(100), 200)
    tracemalloc.start()
    found = plan(readings, [5])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found.clients, found.tried_on) == (20_000, 100)
    assert peak < 1.6 * readings.nbytes  # a half of the rows, and small blocks


def test_a_client_of_mostly_noise_is_left_out_and_named():
    """Three noisy records alone take the discrepancy of random cohorts from 0.11 to -1.03."""
    readings = federation(20, noise=100.0)
    clean = plan(readings, [3])
    readings[4] = federation(1, n=3, noise=100.0, seed=2)[0]
    spoiled = plan(readings, [3], names=[f"site-{i:02d}" for i in range(20)])
    assert spoiled.left_out == ("site-04",) and "site-04" in spoiled.lines()[-1]
    assert spoiled.uniform[3] == pytest.approx(clean.uniform[3], abs=0.01)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        ({"cohort_sizes": [40]}, "a cohort of 40 out of 40"),
        ({"policies": ["fedcor"]}, "'fedcor' does not select by sketches alone"),
        ({"policies": ["sketch-mach"]}, "sketch-match"),
        ({"names": ["a"]}, "1 different names for 40"),
        ({"durations": {"c00": 3.0}}, "seconds of no client, such as '00'"),
        ({"durations": {}}, "seconds of no client"),  # a file of speeds was ignored
    ],
)
def test_mistakes_are_named(call, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        plan(federation(40), **call)


def test_the_command(tmp_path, told, fails) -> None:
    rng = np.random.default_rng(0)
    for i in range(12):
        sketch = RaceSketch.srp(dim=3, rows=10, bits=3)
        sketch.add(3 * np.eye(3)[i % 3] + rng.standard_normal((200, 3)))
        sketch.save(tmp_path / f"c{i:02d}.sketch")
    expected = told("plan", tmp_path, "-k", "3", "--present", "4", "--format", "json")
    assert expected["clients"] == 12
    assert {w["policy"] for w in expected["worths"]} == {"sketch-match", "sketch-match:turns=1"}
    assert "random" in told("plan", tmp_path, "-k", "3")
    assert "'three' must be a whole number" in fails("plan", tmp_path, "-k", "5,three")
    times = tmp_path / "times.csv"
    times.write_text("client,seconds\n" + "".join(f"c{i:02d},{i + 1}\n" for i in range(12)))
    command = ["plan", tmp_path, "-k", "3", "--durations", times]
    assert told(*command, "--format", "json")["worths"][-1]["seconds"] > 0
    times.write_text("client,seconds\nc00,fast\n")
    assert "times.csv, line 2" in fails(*command)


def labeled(clients: int, per_client: int, bits: int = 6, weight: float = 2.0) -> list[RaceSketch]:
    """Sketches of clients that hold `per_client` of ten labels each."""
    rng = np.random.default_rng(0)
    step = Transform(unit=True, classes=10, label_weight=weight)
    out = []
    for i in range(clients):
        sketch = RaceSketch.srp(8, rows=10, bits=bits, transform=step)
        own = (i + np.arange(per_client)) % 10
        sketch.add(rng.standard_normal((200, 8)), rng.choice(own, 200))
        out.append(sketch)
    return out


def test_the_gain_is_the_mean_slope_and_its_t_interval() -> None:
    """Three settings with slopes 10, 20 and 30: Student's t with 2 degrees of freedom, 2.92."""
    fit = GainFit(slope=20, deviation=10, settings=3, largest=0.03)
    half = 2.919986 * 10 * np.sqrt(4 / 3)
    guess = fit.predict(0.02)
    assert np.log(guess.fewer_rounds) == pytest.approx(0.4)
    assert np.log([guess.low, guess.high]) == pytest.approx([0.4 - 0.02 * half, 0.4 + 0.02 * half])
    none = fit.predict(0.0)
    assert (none.fewer_rounds, none.low, none.high) == (1, 1, 1)


def test_rounds_saved_are_estimated_for_sketches_like_the_measured() -> None:
    found = plan(labeled(60, per_client=2), [5])
    assert found.no_gain == ""
    assert found.gain[5] == shipped_fit().predict(found.uniform[5])
    assert found.gain[5].low < found.gain[5].fewer_rounds < found.gain[5].high
    assert any(
        line.startswith("Estimate for sketch-match with cohorts of 5") for line in found.lines()
    )


@pytest.mark.parametrize(
    ("sketches", "size", "why"),
    [
        (labeled(30, 2, bits=4), 5, "6 bits"),
        (labeled(30, 2, weight=1.0), 5, "label weight 2"),
        (labeled(30, 1), 2, "farther from the federation than any measured"),
        (federation(60), 5, "do not state how they were made"),
    ],
)
def test_no_estimate_outside_of_what_was_measured(sketches, size: int, why: str) -> None:
    found = plan(sketches, [size])
    assert found.gain == {} and why in found.no_gain
    assert any("No estimate" in line and why in line for line in found.lines())
