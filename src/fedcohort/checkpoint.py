"""State on disk: nested plain values and arrays in one file, written atomically, never pickled.

The file is a zip archive: ``state.json`` holds the tree, ``0.npy``, ``1.npy``, ... its arrays. A
reader sees the old file or the new one, never a half of either.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedcohort.atomic import write_atomically
from fedcohort.exceptions import InvalidCheckpoint

FORMAT = "fedcohort-checkpoint-2"  # 1 had other random numbers for the same seed


def save(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write `state` to `path`, whole or not at all.

    Parameters
    ----------
    path : path
        Replaced if it exists.
    state : mapping
        Dicts with string keys, lists, tuples (they come back as lists), None, bool, int, float,
        str, NumPy scalars and arrays without objects.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/x.ckpt", {"round": 3, "model": np.arange(2.0)})
    ...     load(f"{folder}/x.ckpt")
    {'round': 3, 'model': array([0., 1.])}
    """
    arrays: list[np.ndarray[Any, Any]] = []
    tree = _pack(state, arrays, "state")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("state.json", json.dumps({"format": FORMAT, "state": tree}))
        for i, array in enumerate(arrays):
            part = io.BytesIO()
            np.lib.format.write_array(part, array, allow_pickle=False)
            archive.writestr(f"{i}.npy", part.getvalue())
    write_atomically(path, buffer.getvalue())


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what `save` wrote; anything else raises `InvalidCheckpoint`."""
    try:
        with zipfile.ZipFile(path) as archive:
            content = json.loads(archive.read("state.json"))
            if content["format"] != FORMAT:
                raise InvalidCheckpoint(f"{path}: format {content['format']!r} is not {FORMAT!r}")
            names = [n for n in archive.namelist() if n.endswith(".npy")]
            arrays = {n: _read_array(archive.read(n)) for n in names}
            state: dict[str, Any] = _unpack(content["state"], arrays)
            return state
    except FileNotFoundError:
        raise InvalidCheckpoint(f"{path}: no such checkpoint") from None
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError) as error:
        if isinstance(error, InvalidCheckpoint):
            raise
        raise InvalidCheckpoint(f"{path}: not a whole checkpoint ({error})") from error


def _pack(value: Any, arrays: list[np.ndarray[Any, Any]], where: str) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError(f"checkpoint: {where} is an array of Python objects")
        arrays.append(value)
        return {"__array__": len(arrays) - 1}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"checkpoint: {where} has the key {key!r}, which is no string")
        # Keys that look like the array mark are client ids or the like: they are kept apart.
        return {"__dict__": {k: _pack(v, arrays, f"{where}.{k}") for k, v in value.items()}}
    if isinstance(value, list | tuple):
        return [_pack(v, arrays, f"{where}[{i}]") for i, v in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"checkpoint: {where} is a {type(value).__name__}, which cannot be saved")


def _unpack(value: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, dict):
        if "__array__" in value:
            return arrays[f"{value['__array__']}.npy"]
        return {k: _unpack(v, arrays) for k, v in value["__dict__"].items()}
    if isinstance(value, list):
        return [_unpack(v, arrays) for v in value]
    return value


def _read_array(content: bytes) -> np.ndarray[Any, Any]:
    return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
