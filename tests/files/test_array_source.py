"""Arrays against what was saved, whole and damaged; more damage is done in tests/soak."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files import Want, open_source

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (7, 2, 3), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2, 0], np.uint8)
CODES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}


def idx(array):
    code = CODES[array.dtype.str[1:]]
    head = struct.pack(">HBB", 0, code, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


def rows(path, **want):
    return np.concatenate([block.x for block in open_source(path, Want(**want)).blocks()])


@pytest.mark.parametrize("dtype", ["u1", "i8", "f2", "f4", ">f4", "f8", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_of_any_dtype_and_order(tmp_path, dtype, order):
    array = np.array(RNG.integers(0, 2, (9, 4)), dtype, order=order)
    np.save(tmp_path / "x.npy", array)
    source = open_source(tmp_path / "x.npy", Want(batch_rows=4))
    blocks = [block.x for block in source.blocks()]
    assert [len(b) for b in blocks] == [4, 4, 1]
    assert np.array_equal(np.concatenate(blocks), array)
    assert blocks[0].dtype.isnative
    assert (source.rows, source.dim, source.columns) == (9, 4, ())


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_members_are_columns(tmp_path, save):
    path = tmp_path / "x.npz"
    save(path, images=IMAGES, labels=LABELS, writers=LABELS.astype("u2"), ids=np.array(["p", "q"]))
    want = Want(columns=("images",), label="labels", by="writers", batch_rows=4)
    first, second = open_source(path, want).blocks()
    assert np.array_equal(np.concatenate([first.x, second.x]), IMAGES.reshape(7, 6))
    assert (second.y.tolist(), second.clients.tolist()) == ([1, 2, 0], ["1", "2", "0"])
    assert rows(path, columns=("images", "images")).shape == (7, 12)
    for want, message in (
        (Want(), r"choose with --columns one of images, labels"),
        (Want(columns=("pictures",)), r"no array 'pictures'; there are images, labels"),
        (Want(columns=("images",), by="ids"), r"x\.npz\[ids\]: .* of shape \(2,\)"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            open_source(path, want)


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("packed", [False, True])
def test_idx_of_every_type(tmp_path, kind, packed):
    array = RNG.integers(0, 100, (5, 2, 2)).astype(kind)
    name = "train-images-idx3-ubyte.gz" if packed else "train-images.idx"
    (tmp_path / name).write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    assert np.array_equal(rows(tmp_path / name, batch_rows=2), array.reshape(5, 4))


BEYOND_UNICODE = np.array([0x41, 0x7FFFFFFF], np.uint32).view("U1")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.asfortranarray(np.ones((2, 3)))}, r"x\.npz\[x\]: stored by columns"),
        ({"x": np.ones((2, 3)), "who": BEYOND_UNICODE}, r"x\.npz: 0x7fffffff is not a letter"),
        ({"x": np.zeros((1, 2)), "who": np.zeros(1, "U5000")}, "too long for names"),
        ({"x": np.zeros(3)}, r"x\.npz\[x\]: float64 .* table of numbers"),
        ({"x": np.array(1.0)}, "table of numbers"),
        ({"x": np.array(["a"])}, "table of numbers"),
        ({"x": np.array([{}], object)}, "object"),
        ({"x": np.zeros((2, 2), complex)}, "complex128"),
    ],
)
def test_arrays_that_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(DataError, match=message):
        rows(tmp_path / "x.npz", columns=("x",), by="who" if "who" in arrays else None)


def test_headers_that_promise_too_much_allocate_nothing(tmp_path):
    path = tmp_path / "x.idx"
    path.write_bytes(struct.pack(">HBB4I", 0, 14, 4, 7, 2**32 - 1, 2**32 - 1, 2**32 - 1))
    with pytest.raises(DataError, match="1 to 1048576 numbers"):
        rows(path)


@pytest.mark.parametrize("name", ["x.idx", "x.npz", "x.idx.gz"])
def test_more_or_other_data_than_the_header_promises(tmp_path, name):
    path = tmp_path / name
    if name == "x.npz":
        np.savez(path, x=IMAGES)
        content = path.read_bytes()
        at = content.index(IMAGES.tobytes()) + 5
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    else:
        content = idx(IMAGES) + b"!"
        path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(DataError, match=r"x\..*: cannot be read: (more data follow|Bad CRC)"):
        rows(path)


def test_missing_numbers(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[1, 2], [3, np.nan], [5, 6]]))
    with pytest.raises(DataError, match=r"x\.npy: column 1, row 1: the value is missing"):
        rows(tmp_path / "x.npy", batch_rows=1)
    assert rows(tmp_path / "x.npy", nulls="drop").tolist() == [[1, 2], [5, 6]]


def test_a_folder_of_arrays(tmp_path):
    for part in range(3):
        np.save(tmp_path / f"part-{part}.npy", np.full((2, 2), part))
    assert rows(tmp_path)[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    np.save(tmp_path / "part-3.npy", np.zeros((2, 3)))
    with pytest.raises(DataError, match=r"part-3\.npy: rows of 3 numbers, not 2"):
        open_source(tmp_path, Want())


def test_named_columns_and_texts_are_for_tables(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((2, 2)))
    for want in (Want(columns=("a",)), Want(label="y.npy"), Want(by="who.npy")):
        with pytest.raises(ConfigError, match=r"x\.npy: .* into an \.npz file"):
            open_source(tmp_path / "x.npy", want)
    with pytest.raises(ConfigError, match="texts"):
        open_source(tmp_path / "x.npy", Want(text="a"))
