from __future__ import annotations

import numpy as np

from fedcohort.gates import CMFL
from fedcohort.signals.projection import Vectors


def test_agreement_by_hand():
    gate = CMFL(threshold=0.5)
    start = Vectors(np.zeros(4))
    models = Vectors(np.array([[1, 1, -1, 0], [-1, -1, 1, 0], [1, -1, -1, 5]], float))
    first = gate.announce(start)
    assert first.nbytes == 0
    assert gate.probe(first, start, models).tolist() == [[1.0]] * 3
    gate.aggregated(start, Vectors(np.array([0.5, 0.5, -0.5, 0.0])))
    message = gate.announce(start)
    assert message.nbytes == 2  # two bits a parameter, in whole bytes
    shares = gate.probe(message, start, models)
    assert shares[:, 0].tolist() == [1.0, 0.25, 0.5]
    assert gate.decide(dict(zip("abc", shares, strict=True))) == ("a", "c")


def test_a_model_that_is_not_finite_is_not_asked():
    gate = CMFL(threshold=0.0)
    start = Vectors(np.zeros(2))
    gate.aggregated(start, Vectors(np.ones(2)))
    models = np.array([[np.nan, 1.0], [1.0, 1.0]])
    shares = gate.probe(gate.announce(start), start, Vectors(models))
    assert gate.decide(dict(zip("ab", shares, strict=True))) == ("b",)


def test_decay_lowers_the_bar():
    gate = CMFL(threshold=0.8, decay=True)
    answer = {"a": np.array([0.5], np.float32)}
    assert [gate.decide(answer) for _ in range(3)] == [(), (), ("a",)]  # 0.8, 0.57, 0.46


def test_a_model_that_stands_still_is_reported_once(caplog):
    gate = CMFL(threshold=0.8)
    silent = {"a": np.array([0.5], np.float32)}
    for _ in range(19):
        gate.decide(silent)
    assert not caplog.records
    gate.decide({"a": np.array([0.9], np.float32)})  # an upload: counted from the start again
    for _ in range(60):
        gate.decide(silent)
    (record,) = caplog.records
    assert "no update passed in the last 20 rounds" in record.getMessage()
    assert "lower threshold=0.8" in record.getMessage()
