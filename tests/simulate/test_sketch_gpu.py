from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import hadamard as sylvester

torch = pytest.importorskip("torch")

from fedcohort.simulate import sketch_gpu  # noqa: E402
from fedcohort.simulate.sketch_gpu import federation_counts, hadamard, hash_counts  # noqa: E402
from fedcohort.sketch.race import RaceSketch  # noqa: E402
from fedcohort.sketch.transforms import Transform  # noqa: E402

SIZES = [(784, 1000, 6, "u1"), (100, 300, 5, "f4"), (600, 70, 3, "f8"), (3, 10, 2, "i8")]


def example(dim, rows, bits, kind, n=25):
    rng = np.random.default_rng(dim)
    x = rng.integers(0, 256, (n, dim)) if kind == "u1" else rng.normal(scale=50, size=(n, dim))
    x = x.astype(kind)
    sketch = RaceSketch.srp(dim=dim, rows=rows, bits=bits, seed=3)
    sketch.add(x)
    return torch.from_numpy(x), sketch


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scratch", [1 << 28, 1 << 16])
def test_torch_counts_equal_those_of_the_cpu(size, scratch, monkeypatch):
    monkeypatch.setattr(sketch_gpu, "SCRATCH", scratch)  # the small one needs many passes
    x, sketch = example(*size)
    counts = hash_counts(x, sketch.family)
    np.testing.assert_array_equal(counts.numpy(), sketch.counts)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [*SIZES, (2000, 200, 4, "f4")])
def test_gpu_counts_equal_those_of_the_cpu(size):
    x, sketch = example(*size)
    for method in ("triton", "torch"):
        counts = hash_counts(x.cuda(), sketch.family, method)
        np.testing.assert_array_equal(counts.cpu().numpy(), sketch.counts)


def test_extreme_scales_are_hashed_alike():
    x, sketch = example(100, 50, 4, "f8")
    factors = torch.tensor([2.0**200, 2.0**-200, 0.0, 1.0, -1.0], dtype=torch.float64).repeat(5)
    x = x * factors[:, None]
    other = sketch.empty_like()
    other.add(x.numpy())
    np.testing.assert_array_equal(hash_counts(x, sketch.family).numpy(), other.counts)


def test_transform_agrees_with_numpy():
    x = np.random.default_rng(0).integers(-99, 99, (3, 64)).astype(np.float32)  # exact sums
    np.testing.assert_array_equal(hadamard(torch.from_numpy(x)).numpy(), x @ sylvester(64))


def test_wrong_input_is_named():
    sketch = RaceSketch.srp(dim=3, rows=4, bits=2)
    with pytest.raises(ValueError, match=r"shape \(2, 4\)"):
        hash_counts(torch.ones(2, 4), sketch.family)
    with pytest.raises(ValueError, match="row 1"):
        hash_counts(torch.tensor([[1.0, 2, 3], [1, float("inf"), 3]]), sketch.family)
    assert int(hash_counts(torch.ones(0, 3), sketch.family).sum()) == 0


CENTER = np.random.default_rng(5).random(30)
TRANSFORMS = [
    Transform(),
    Transform(unit=True),
    Transform(center=0.3, scale=0.7),
    Transform(center=CENTER, scale=CENTER + 0.1, unit=True),
    Transform(center=CENTER, unit=True, classes=4, label_weight=0.37),
    Transform(classes=4, label_weight=2.0),
]
PARTS = [np.array([3, 1, 4, 1, 5]), np.array([9]), np.arange(40), np.empty(0, np.int64)]


def federation(transform):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(40, 5, 6)) * 10.0 ** rng.integers(-6, 7, (40, 1, 1))
    x[9] = 0
    x = x.astype(np.float32)
    y = rng.integers(0, 4, 40)
    empty = RaceSketch.srp(dim=30, rows=50, bits=4, seed=2, transform=transform)
    expected = []
    for part in PARTS:
        sketch = empty.empty_like()
        sketch.add(x[part], y[part] if transform.classes else None)
        expected.append(sketch.counts)
    labels = torch.from_numpy(y) if transform.classes else None
    return empty, torch.from_numpy(x), labels, expected


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("method", ["auto", "torch"])
@pytest.mark.parametrize("scratch", [1 << 28, 3 << 11])
def test_a_federation_is_sketched_as_client_by_client(transform, method, scratch, monkeypatch):
    """The small scratch takes single clients and few samples at a time."""
    monkeypatch.setattr(sketch_gpu, "SCRATCH", scratch)
    empty, x, labels, expected = federation(transform)
    found = list(federation_counts(empty, x, PARTS, labels, method))
    assert [c.dtype for c in found] == [np.int64] * len(PARTS)
    np.testing.assert_array_equal(found, expected)
    assert empty.n == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("method", ["auto", "torch"])
def test_a_federation_is_sketched_alike_on_a_gpu(transform, method):
    empty, x, labels, expected = federation(transform)
    labels = None if labels is None else labels.cuda()
    found = list(federation_counts(empty, x.cuda(), PARTS, labels, method))
    np.testing.assert_array_equal(found, expected)


def test_wrong_labels_and_families_are_named():
    labeled = RaceSketch.srp(dim=3, transform=Transform(classes=2, label_weight=1.0))
    x, parts = torch.ones(2, 3), [np.arange(2)]
    with pytest.raises(ValueError, match="pass labels"):
        list(federation_counts(labeled, x, parts, method="torch"))
    with pytest.raises(ValueError, match="from 0 to 1"):
        list(federation_counts(labeled, x, parts, torch.tensor([0, 2]), method="torch"))
    with pytest.raises(ValueError, match="SRP only"):
        list(federation_counts(RaceSketch.pstable(dim=3), x, parts, method="torch"))
    (counts,) = federation_counts(RaceSketch.pstable(dim=3, rows=5), x, parts)
    assert counts.sum(axis=1).tolist() == [2] * 5
