from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fedcohort.simulate import sketch_gpu  # noqa: E402
from fedcohort.simulate.sketch_gpu import hadamard, hash_counts  # noqa: E402
from fedcohort.sketch.race import RaceSketch  # noqa: E402

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
    from fedcohort.sketch.hashing.base import hadamard as plain

    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    np.testing.assert_array_equal(hadamard(torch.from_numpy(x)).numpy(), plain(x))


def test_wrong_input_is_named():
    sketch = RaceSketch.srp(dim=3, rows=4, bits=2)
    with pytest.raises(ValueError, match=r"shape \(2, 4\)"):
        hash_counts(torch.ones(2, 4), sketch.family)
    with pytest.raises(ValueError, match="row 1"):
        hash_counts(torch.tensor([[1.0, 2, 3], [1, float("inf"), 3]]), sketch.family)
    dense = RaceSketch.srp(dim=3, rows=4, bits=2, family="dense")
    with pytest.raises(ValueError, match="dense"):
        hash_counts(torch.ones(2, 3), dense.family)
    assert int(hash_counts(torch.ones(0, 3), sketch.family).sum()) == 0
