"""The simulator against plain FedAvg written out, and its promises about seeds and checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedcohort import storage
from fedcohort.datasets import federate, load
from fedcohort.exceptions import ConfigError, InvalidCheckpoint, NoClients
from fedcohort.gates import SketchToSkip
from fedcohort.simulate import Durations, LocalTraining, Pace, Simulation, Trace, build, simulate
from fedcohort.simulate.local import batch_plans

LOCAL = LocalTraining(epochs=2, batch_size=16, lr=0.05)


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def clients(digits, seed=0, count=20):
    return federate(digits, "shards", clients=count, seed=seed, per_client=2)


def model(seed=0):
    return build("mlp-64-30", (1, 8, 8), classes=10, seed=seed)


def start(digits, policy="uniform", **options):
    options = {"cohort_size": 4, "local": LOCAL, "device": "cpu"} | options
    return Simulation(clients(digits), model(), policy, **options)


def run(digits, policy="uniform", rounds=4, **options):
    options = {"cohort_size": 4, "local": LOCAL, "device": "cpu"} | options
    return simulate(clients(digits), model(), policy, rounds=rounds, **options)


def test_it_is_fedavg(digits):
    """Two rounds by hand: one client after the other, torch's own SGD, the mean."""
    federation, net = clients(digits), model()
    simulation = Simulation(
        federation, net, "uniform", cohort_size=4, local=LOCAL, device="cpu", seeds=(5,)
    )
    expected = copy.deepcopy(net)
    for number in range(2):
        (record,) = simulation.step()
        trained = []
        for client in record.selected:
            local = copy.deepcopy(expected)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.05)
            rows = federation.parts[client]
            for batch in batch_plans(5, number, [client], [len(rows)], LOCAL)[0].batches():
                x = torch.from_numpy(digits.x[rows[batch]])
                y = torch.from_numpy(digits.y[rows[batch]])
                optimizer.zero_grad()
                nn.functional.cross_entropy(local(x), y).backward()
                optimizer.step()
            trained.append([p.detach() for p in local.parameters()])
        with torch.no_grad():
            for i, param in enumerate(expected.parameters()):
                param.copy_(torch.stack([t[i] for t in trained]).mean(0))
    for ours, theirs in zip(simulation.model().parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    hits = expected(torch.from_numpy(digits.x_test)).argmax(1).numpy() == digits.y_test
    assert record.accuracy == pytest.approx(hits.mean())


def test_seeds_together_equal_seeds_alone(digits):
    together = run(digits, seeds=(0, 1, 2))
    for history in together:
        (alone,) = run(digits, seeds=(history.seed,))
        assert alone.selections == history.selections
        assert alone.accuracy == pytest.approx(history.accuracy, abs=0.004)  # one digit of 359


@pytest.mark.parametrize(
    "options",
    [
        {"gate": SketchToSkip(0.05, k=20)},
        {"pace": Pace(over_select=1.5, deadline="60%", late="next")},
    ],
)
def test_resume_equals_an_uninterrupted_run(digits, tmp_path, options):
    options |= {"seeds": (0, 1), "aggregation": "fedavgm", "dropout": 0.3}
    options["durations"] = Durations.draw(clients(digits).clients, 0, sigma=1.0)
    whole, resumed = (start(digits, "oort", **options) for _ in range(2))
    for _ in range(6):
        whole.step()
    storage.save(tmp_path / "state", whole.state_dict())
    resumed.load_state_dict(storage.load(tmp_path / "state"))
    assert [resumed.step() for _ in range(4)] == [whole.step() for _ in range(4)]


def test_a_checkpoint_of_another_run_is_refused(digits):
    state = start(digits).state_dict()
    for other in ({"seeds": (3,)}, {"policy": "oort"}, {"cohort_size": 2}):
        with pytest.raises(InvalidCheckpoint):
            start(digits, **other).load_state_dict(state)


def test_losses_are_measured_on_what_a_client_does_not_train_on(digits):
    federation = clients(digits)
    simulation = start(digits, holdout=0.2)
    seed = simulation.seeds[0]
    simulation.step()
    held_out = seed.held_out
    for client, part in federation.parts.items():
        kept = seed.federation.parts[client]
        assert sorted([*kept, *held_out[client]]) == sorted(part)
        assert len(held_out[client]) == round(0.2 * len(part))
    client = federation.clients[3]
    model, rows = simulation.model(), held_out[client]
    with torch.no_grad():
        outputs = model(torch.from_numpy(digits.x[rows]))
        expected = nn.functional.cross_entropy(outputs, torch.from_numpy(digits.y[rows]))
    assert seed.collect("loss", [client])[client] == pytest.approx(float(expected), rel=1e-5)
    again = start(digits, holdout=0.2).seeds[0].federation
    assert all((again.parts[c] == p).all() for c, p in seed.federation.parts.items())


def test_the_training_set_is_evaluated_on_request(digits):
    simulation = start(digits, train_accuracy=True, evaluate_every=2)
    (first,), (second,) = simulation.step(), simulation.step()
    assert first.train_accuracy is None
    with torch.no_grad():
        right = simulation.model()(torch.from_numpy(digits.x)).argmax(1).numpy() == digits.y
    assert second.train_accuracy == pytest.approx(right.mean(), abs=1e-6)


def test_a_run_stops_when_accuracy_has_stalled(digits):
    frozen = LocalTraining(lr=1e-12)
    (history,) = run(digits, rounds=20, local=frozen, patience=3)
    assert len(history.rounds) == 4  # the first, and three without a gain
    assert len(run(digits, rounds=5, patience=5)[0].rounds) == 5


def test_dropouts_and_traces(digits):
    (history,) = run(digits, rounds=6, dropout=0.5)
    assert any(len(r.finished) < len(r.selected) for r in history.rounds)
    names = sorted(clients(digits).parts)
    trace = Trace({1: names[:4], 3: names[10:12]})
    (history,) = run(digits, rounds=3, availability=trace)
    assert [set(s) for s in history.selections] == [set(names[:4])] * 2 + [set(names[10:12])]
    with pytest.raises(NoClients, match="round 1"):
        run(digits, availability=Trace({1: ["stranger"]}))


def test_a_round_without_any_update_leaves_the_model_as_it_is(digits):
    simulation = start(digits, dropout=1 - 1e-12)
    before = simulation.seeds[0].model.clone()
    (record,) = simulation.step()
    assert record.finished == ()
    assert torch.equal(simulation.seeds[0].model, before)


def test_a_diverged_client_counts_as_not_finished(digits, caplog):
    def loss(outputs, y):
        plain = nn.functional.cross_entropy(outputs, y, reduction="none")
        return plain * torch.where(y == 3, torch.nan, 1.0)

    (history,) = run(digits, rounds=5, loss=loss)
    assert not caplog.records
    run(digits, rounds=3, local=LocalTraining(lr=1e30))  # nobody's is finite: said once
    assert [r.getMessage()[:25] for r in caplog.records] == ["round 1: training diverged"[:25]]
    parts = clients(digits).parts
    broken = {c for c, rows in parts.items() if 3 in digits.y[rows]}
    assert broken & {c for cohort in history.selections for c in cohort}
    for record in history.rounds:
        assert set(record.finished) == set(record.selected) - broken


def test_skipping_accumulates_drift(digits):
    """With a threshold that a few rounds of drift reach, some rounds skip and some do not."""
    options = {"local": LocalTraining(steps=1, batch_size=16, lr=0.05), "rounds": 30}
    (kept,) = run(digits, gate=SketchToSkip(0.02, k=50), **options)
    assert {r.skipped for r in kept.rounds} == {True, False}
    # A skipped round repeats its cohort and leaves the model, so its accuracy, as it was.
    for earlier, record in zip(kept.rounds, kept.rounds[1:], strict=False):
        if earlier.skipped:
            assert record.selected == earlier.selected
        same = (record.accuracy, record.loss) == (earlier.accuracy, earlier.loss)
        assert same == record.skipped
    # A threshold below any drift is no gate at all, but for the sketches' bytes.
    (open_gate,) = run(digits, gate=SketchToSkip(1e-9, k=50), **options)
    (no_gate,) = run(digits, **options)
    assert open_gate.accuracy.tolist() == no_gate.accuracy.tolist()
    assert open_gate.rounds[0].bytes_up == no_gate.rounds[0].bytes_up + 4


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"cohort_size": 21}, "cohort_size=21 exceeds the 20 clients"),
        ({"rounds": 0}, "rounds=0"),
        ({"seeds": (1, 1)}, "different"),
        ({"seeds": ()}, "different"),
        ({"dropout": 1.0}, "dropout"),
        ({"policy": "bogus"}, "unknown policy 'bogus'"),
    ],
)
def test_user_mistakes(digits, options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        run(digits, **options)
