"""Models as named arrays: as the content of a safetensors file, compared and averaged."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import DataError
from fedcohort.rounds import ClientId

Arrays = Mapping[str, NDArray[Any]]
Model = Mapping[str, ArrayLike] | str | os.PathLike[str]
Shapes = dict[str, list[int]]
SUFFIX = ".safetensors"


def content_of(model: Model) -> bytes:
    """Return named arrays, or a safetensors file, as the content of such a file."""
    from safetensors.numpy import save

    if isinstance(model, str | os.PathLike):
        try:
            return Path(model).read_bytes()
        except OSError as error:
            raise DataError(f"model file {model} cannot be read: {error.strerror}") from None
    if not model:
        raise ValueError("a model needs at least one array")
    arrays = {}
    for name, values in model.items():
        array = np.asarray(values, order="C")
        if not isinstance(name, str) or array.dtype.kind not in "fiub":
            raise ValueError(f"model: {name!r} must name an array of numbers, not {array.dtype}")
        arrays[name] = array
    return bytes(save(arrays))


def unpack(content: bytes) -> dict[str, NDArray[Any]]:
    """Return the named arrays of a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return dict(load(content))
    except (SafetensorError, KeyError, AttributeError, TypeError) as error:
        raise DataError(
            f"a model cannot be read as NumPy arrays ({error}); export it, and open the file with "
            "the library that wrote it"
        ) from error


def shapes_of(content: bytes) -> Shapes:
    """Return the shape of every array; DataError for content of another format."""
    from safetensors import SafetensorError, deserialize

    try:
        views = deserialize(content)  # type: ignore[no-untyped-call]
        return {name: list(view["shape"]) for name, view in views}
    except SafetensorError as error:
        raise DataError(f"not the content of a safetensors file: {error}") from None


def architecture_difference(shapes: Shapes, other: Shapes) -> str | None:
    """Return the first difference between two architectures, None if they are alike."""
    if shapes.keys() != other.keys():
        name = sorted(shapes.keys() ^ other.keys())[0]
        return f"array {name!r} is {'new' if name in shapes else 'missing'}"
    for name, shape in shapes.items():
        if shape != other[name]:
            return f"array {name!r} has shape {shape}, not {other[name]}"
    return None


def average(models: Mapping[ClientId, tuple[float, Arrays]]) -> dict[str, NDArray[Any]]:
    """Average models by weights that sum to one; integers are those of the heaviest model."""
    heaviest = max(models, key=lambda client: models[client][0])
    expected = models[heaviest][1]
    for client, (_, arrays) in models.items():
        shapes = [{name: list(a.shape) for name, a in one.items()} for one in (arrays, expected)]
        if problem := architecture_difference(*shapes):
            raise DataError(
                f"clients {client!r} and {heaviest!r}: {problem}; "
                "only models of one architecture can be averaged"
            )
    out = dict(expected)
    for name, like in expected.items():
        if like.dtype.kind == "f":
            total = sum(weight * arrays[name].astype(float) for weight, arrays in models.values())
            out[name] = np.asarray(total, like.dtype)
    return out
