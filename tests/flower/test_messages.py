"""Readings survive the trip; whatever else arrives is refused before memory is taken."""

from __future__ import annotations

import contextlib
import json
import tracemalloc

import numpy as np
import pytest
from flwr.app import ConfigRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedcohort.exceptions import DataError
from fedcohort.flower.wire import (
    Request,
    from_record,
    pack,
    refused,
    to_record,
    unpack,
)
from fedcohort.signals.table import Signals

PLAIN = hnp.arrays(
    st.sampled_from(["<i2", "<i8", "|u1", "<f4", "<f8", "|b1", ">f4", ">i4"]),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)


@given(PLAIN)
def test_plain_readings_come_back_as_they_were(reading):
    data, form = pack(reading)
    found = unpack(data, form, limit=len(data))
    assert len(data) == reading.nbytes and found.shape == reading.shape
    assert found.dtype == reading.dtype.newbyteorder("<")
    np.testing.assert_array_equal(found, reading)


@pytest.mark.parametrize(
    "form",
    [
        '["|O", []]',
        '["<U2", []]',
        '["<c8", []]',
        '["<m8[s]", []]',
        '["<f8", [-1]]',
        '["<f8", [1.0]]',
        '["<f8", [true]]',
        '["<f8", [2]]',
        '["<f8", [1, 1, 1, 1, 1]]',
        '["<f8", [1099511627776, 1099511627776]]',
        "[[], []]",
        '[[["n", "|O", []]], []]',
        '[[["n", "<f8"]], []]',
        '[[["n", "<f4", []], ["n", "<f4", []]], []]',
        '["<f8"]',
        "null",
        "nonsense",
        "[" * 900,
        json.dumps(["<f8", []]) + " " * 2000,
    ],
)
def test_other_forms_are_refused(form):
    with pytest.raises(DataError):
        unpack(b"12345678", form, limit=100)


SIZES = st.sampled_from([0, 1, 2, 2**31, 2**40 - 1, 2**63]) | st.integers(-1, 9)
SHAPES = st.lists(SIZES, max_size=5)
DTYPES = st.sampled_from(["<f8", "|u1", "|O", "<U2", ""])
FIELDS = st.lists(st.tuples(st.text(max_size=2), DTYPES, SHAPES), max_size=3)


@given(st.sampled_from([b"", b"12345678"]), DTYPES | FIELDS, SHAPES)
def test_shapes_with_zeros_and_extremes_are_read_or_refused(data, dtype, shape):
    """Zero bytes once claimed the shape (0, 2^40-1, 2^40-1, 2^40-1) and stopped every server."""
    with contextlib.suppress(DataError):
        assert unpack(data, json.dumps([dtype, shape]), limit=64).nbytes == len(data)


def test_a_reading_that_is_too_large_takes_no_memory():
    data = bytes(50_000_000)
    tracemalloc.start()
    with pytest.raises(DataError, match="at most 1000"):
        unpack(data, '["|u1", [50000000]]', limit=1000)
    opaque = refused(data)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    assert opaque.nbytes == len(data)


@pytest.mark.parametrize("data", [b"", b"x", b"12345678"])
def test_refused_bytes_are_dropped_and_counted_even_if_they_come_first(data):
    signals = Signals()
    assert signals.record("loss", {"a": refused(data)}, 0) == ()
    assert signals.dropped == {"loss": 1}
    assert signals.record("loss", {"b": 0.5}, 1) == ("b",)


def test_a_record_without_the_reading_is_refused():
    with pytest.raises(DataError):
        from_record(ConfigRecord({"loss": 3}), "loss", 100)
    with pytest.raises(DataError):
        from_record(to_record({"loss": 0.5}), "loss_rms", 100)


def test_a_request_comes_back_as_it_was():
    request = Request(3, 7, "v", "weights", ("loss",), {"loss": {"k": 1, "kind": "x"}}, "cmfl")
    assert Request.from_json(request.to_json()) == request


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"round": 1}', 5, None, '{"signals": 3}'])
def test_other_requests_are_refused(text):
    with pytest.raises(DataError):
        Request.from_json(text)
