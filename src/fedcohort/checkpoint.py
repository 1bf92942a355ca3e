"""State on disk: nested plain values and arrays in one file, written atomically, never pickled.

The file is a zip archive without compression: ``state.json`` holds the tree, ``0.npy``,
``1.npy``, ... its arrays. A reader sees the old file or the new one, never a part of either, and
never takes more memory than a few times the size of the file.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedcohort import npy
from fedcohort.atomic import write_atomically
from fedcohort.exceptions import FedcohortError, InvalidCheckpoint

FORMAT = "fedcohort-checkpoint-2"  # 1 had other random numbers for the same seed
# What zipfile and json raise on a damaged file.
DAMAGED = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    EOFError,
    OverflowError,
    RecursionError,
    RuntimeError,
    NotImplementedError,
    MemoryError,
    struct.error,
    zipfile.BadZipFile,
)


def save(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write `state` to `path`, all of it or nothing.

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
        _add(archive, "state.json", json.dumps({"format": FORMAT, "state": tree}).encode())
        for i, array in enumerate(arrays):
            part = io.BytesIO()
            np.lib.format.write_array(part, array, allow_pickle=False)
            _add(archive, f"{i}.npy", part.getvalue())
    write_atomically(path, buffer.getvalue())


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    """Add a member without the time of day: equal states give equal files, on any clock."""
    archive.writestr(zipfile.ZipInfo(name), content)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what `save` wrote; anything else raises `InvalidCheckpoint`."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _load(archive, os.stat(path).st_size)
    except FileNotFoundError:
        raise InvalidCheckpoint(f"{path}: no such checkpoint") from None
    except DAMAGED as error:
        if isinstance(error, FedcohortError):
            raise InvalidCheckpoint(f"{path}: {error}") from None
        reason = str(error)[:200] or type(error).__name__
        raise InvalidCheckpoint(f"{path}: not a whole checkpoint ({reason})") from error


def _load(archive: zipfile.ZipFile, size: int) -> dict[str, Any]:
    members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("a member is compressed")
    if sum(member.file_size for member in members) > size:
        raise ValueError("its members claim more bytes than the file has")
    content = json.loads(archive.read("state.json"))
    if content["format"] != FORMAT:
        raise InvalidCheckpoint(f"format {str(content['format'])[:80]!r} is not {FORMAT!r}")
    names = [member.filename for member in members if member.filename.endswith(".npy")]
    arrays = {name: npy.decode(archive.read(name)).copy() for name in names}
    state = _unpack(content["state"], arrays)
    if not isinstance(state, dict):
        raise ValueError(f"its state is a {type(state).__name__}")
    return state


def restore(
    path: str | os.PathLike[str], load_state_dict: Callable[[Any], None], state: Mapping[str, Any]
) -> None:
    """Give a state to what should continue from it; InvalidCheckpoint if it does not fit.

    Parameters
    ----------
    path : path
        Named in the error.
    load_state_dict : callable
    state : mapping
        What `load` returned, or a part of it.
    """
    try:
        load_state_dict(state)
    except FedcohortError:
        raise
    except (*DAMAGED, IndexError, AssertionError) as error:
        raise InvalidCheckpoint(
            f"{path}: its state does not fit ({type(error).__name__}: {str(error)[:200]})"
        ) from error


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
                raise TypeError(f"checkpoint: {where} has the key {key!r}, which is not a string")
        # A mark of its own, because a client may be named "__array__".
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
