from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcohort.datasets import load
from fedcohort.exceptions import DataError

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 28, 28), dtype=np.uint8)
FEMNIST = {
    "images": IMAGES,
    "labels": (np.arange(12) * 5).astype(np.uint8),
    "writers": np.repeat([0, 1, 2], 4).astype(np.uint16),
    "writer_ids": np.array(["f0001_00", "f0002_11", "f0003_22"]),
    "is_test": np.tile([False, False, False, True], 3),
}


def write_femnist(root, **changes):
    folder = root / "femnist"
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {key: value for key, value in (FEMNIST | changes).items() if value is not None}
    np.savez_compressed(folder / "femnist.npz", **arrays)
    return folder


def test_femnist_round_trip(tmp_path):
    write_femnist(tmp_path)
    data = load("femnist", tmp_path)
    test = FEMNIST["is_test"]
    expected = IMAGES[~test].astype(np.float32) / np.float32(255)  # not inverted
    assert np.array_equal(data.x[:, 0], expected)
    assert data.classes == 62
    assert data.client_ids is not None
    assert data.client_ids.tolist() == ["f0001_00"] * 3 + ["f0002_11"] * 3 + ["f0003_22"] * 3
    assert data.test_client_ids is not None
    assert data.test_client_ids.tolist() == ["f0001_00", "f0002_11", "f0003_22"]
    assert data.y_test.tolist() == [15, 35, 55]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_test": None}, "array 'is_test' is missing"),
        ({"images": IMAGES.astype(np.float32)}, "images is float32"),
        ({"images": IMAGES[:, :27]}, r"images is uint8 of shape \(12, 27, 28\)"),
        ({"labels": FEMNIST["labels"][:7]}, r"images is uint8 of shape \(12, 28, 28\)"),
        ({"labels": np.full(12, 62, np.uint8)}, "a label 62"),
        ({"labels": np.uint8(3)}, "labels is|images is"),
        ({"writers": np.full(12, 3, np.uint16)}, "writer 3 is not in writer_ids"),
        ({"writer_ids": np.arange(3)}, "writer_ids is int64"),
        ({"writer_ids": np.array([["a"], ["b"], ["c"]])}, r"shape \(3, 1\)"),
        ({"is_test": np.zeros(12, np.uint8)}, "is_test is uint8"),
        ({"images": np.asfortranarray(IMAGES)}, "images.*stored by columns"),
    ],
)
def test_damaged_femnist_arrays(changes, message, tmp_path):
    write_femnist(tmp_path, **changes)
    with pytest.raises(DataError, match=message) as caught:
        load("femnist", tmp_path)
    assert "femnist.npz" in str(caught.value)
    assert "must contain arrays images uint8" in str(caught.value)


def test_femnist_never_unpickles(tmp_path):
    folder = write_femnist(tmp_path)
    ids = np.array(["a", "b", "c"], dtype=object)
    np.savez(folder / "femnist.npz", **(FEMNIST | {"writer_ids": ids}))
    with pytest.raises(DataError, match=r"writer_ids.*claims object"):
        load("femnist", tmp_path)


def test_a_header_that_promises_too_much_allocates_nothing(tmp_path):
    header = io.BytesIO()
    shape = (10**9, 28, 28)
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": shape}
    )
    path = write_femnist(tmp_path) / "femnist.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", header.getvalue() + b"\0" * 100)
    with pytest.raises(DataError, match="claims uint8 of shape"):
        load("femnist", tmp_path)


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_archive_never_gives_wrong_data_or_a_stray_error(tmp_path, data):
    path = tmp_path / "femnist" / "femnist.npz"
    whole = bytearray((write_femnist(tmp_path) / "femnist.npz").read_bytes())
    good = load("femnist", tmp_path)
    if data.draw(st.booleans()):
        whole = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    try:
        loaded = load("femnist", tmp_path)
    except DataError:
        return
    assert np.array_equal(loaded.x, good.x)
    assert np.array_equal(loaded.y, good.y)
