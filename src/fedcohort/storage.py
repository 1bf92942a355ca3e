"""What lies on disk: files written whole or not at all, locks, checkpoints and .npy headers.

**Atomic files.** A file is written under a temporary name, synced and renamed. A killed writer can
leave the temporary file behind; `remove_leftovers` deletes those that no live writer has locked.

**Checkpoints.** Nested plain values and arrays in a zip archive without compression:
``state.json`` holds the tree, ``0.npy``, ``1.npy``, ... its arrays. Nothing is pickled, and a
reader never takes more memory than a few times the size of the file.

**Arrays.** NumPy's own reader allocates what an .npy header claims, and raises about ten kinds of
errors on a damaged one. Here it is a ValueError, before anything is allocated.
"""

from __future__ import annotations

import ast
import io
import json
import math
import os
import re
import secrets
import struct
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from fedcohort.exceptions import (
    ConfigError,
    DataError,
    FedcohortError,
    FolderInUse,
    InvalidCheckpoint,
)

SUFFIX = ".fedcohort-tmp"
LOCK = ".lock"


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one, never a part.

    The file and the folder's entry for it are synced, so that they also survive a power cut. A
    device or a pipe, such as ``/dev/stdout``, is written to and never replaced; a symbolic link
    stays, and the file it leads to is replaced.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        target.write_bytes(content)  # refuses a folder
        return
    target = Path(os.path.realpath(target))
    try:
        with _temporary(target) as (file, name):
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(name, target)
            sync_folder(target.parent)
    except OSError as error:
        if error.errno is not None:  # else its text is all it says, and a name would hide it
            error.filename = str(path)  # and neither nothing nor the temporary file
        raise


@contextmanager
def _temporary(target: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """Open a new locked file beside `target`; it is deleted unless it was renamed."""
    while True:
        name = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}{SUFFIX}")
        with open(name, "xb") as file:
            try:
                if not _try_lock(file) or not name.exists():
                    continue  # before the lock, it was taken for a leftover and deleted
                yield file, name
                return
            finally:
                name.unlink(missing_ok=True)


def remove_leftovers(folder: str | os.PathLike[str]) -> list[Path]:
    """Delete the temporary files of killed writers in a folder, and return them."""
    removed = []
    for path in sorted(Path(folder).glob(f".*{SUFFIX}")):  # nothing if the folder is missing
        with suppress(OSError), open(path, "rb+") as file:  # renamed meanwhile, or not ours
            if _try_lock(file):
                path.unlink(missing_ok=True)
                removed.append(path)
    return removed


@contextmanager
def locked_folder(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Hold a folder until this process ends, however it ends; FolderInUse if another holds it."""
    refuse_links_in(folder)
    with open(Path(folder) / LOCK, "ab") as file:
        if not _try_lock(file):
            raise FolderInUse(
                f"{folder} is being written by another process; wait for it, or use another folder"
            )
        yield


def make_folder(folder: str | os.PathLike[str]) -> Path:
    """Make a folder for a run if it does not exist; one with links among its entries is refused."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"{folder}: a file is in the way of this folder") from None
    refuse_links_in(folder)
    return Path(folder)


def refuse_links_in(folder: str | os.PathLike[str]) -> None:
    """Raise DataError if an entry of a folder is a symbolic link."""
    with os.scandir(folder) as entries:
        refuse_links(*sorted(Path(entry) for entry in entries if entry.is_symlink()))


def refuse_links(*paths: Path) -> None:
    """Raise DataError for a symbolic link: a folder that somebody sent must not reach outside."""
    for path in paths:
        if path.is_symlink():
            raise DataError(
                f"{path} is a symbolic link, which may lead out of its folder; put the file or "
                "folder itself there"
            )


def _try_lock(file: IO[bytes]) -> bool:
    """Lock a file unless another open file of it is locked."""
    from filelock import lock_descriptor

    return lock_descriptor(file.fileno(), blocking=False)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make renames and new files in a folder survive a power cut, where the system can."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


FORMAT = "fedcohort-checkpoint-2"  # 1 had other random numbers for the same seed
# What zipfile and json raise on a damaged file.
DAMAGED = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, OverflowError),
    *(RecursionError, RuntimeError, MemoryError, struct.error, zipfile.BadZipFile),
)


def save(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write `state` to `path`, all of it or nothing.

    It holds dicts with string keys, lists, tuples (they come back as lists), None, bool, int,
    float, str, NumPy scalars and arrays without objects.
    """
    arrays: list[np.ndarray[Any, Any]] = []
    tree = _pack(state, arrays, "state")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        # a ZipInfo without the time of day: equal states give equal files, on any clock
        content = json.dumps({"format": FORMAT, "state": tree})
        archive.writestr(zipfile.ZipInfo("state.json"), content)
        for i, array in enumerate(arrays):
            part = io.BytesIO()
            npy_format.write_array(part, array, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{i}.npy"), part.getvalue())
    write_atomically(path, buffer.getvalue())


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
    arrays = {name: decode_npy(archive.read(name)).copy() for name in names}
    state = _unpack(content["state"], arrays)
    if not isinstance(state, dict):
        raise ValueError(f"its state is a {type(state).__name__}")
    return state


def restore(
    path: str | os.PathLike[str], load_state_dict: Callable[[Any], None], state: Mapping[str, Any]
) -> None:
    """Give a state that was read from `path` to what continues from it."""
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
        if strange := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"checkpoint: {where} has the key {strange[0]!r}, not a string")
        # A mark of its own, because a client may be named "__array__".
        return {"__dict__": {k: _pack(v, arrays, f"{where}.{k}") for k, v in value.items()}}
    if isinstance(value, list | tuple):
        return [_pack(v, arrays, f"{where}[{i}]") for i, v in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"checkpoint: {where} is a {type(value).__name__}, which cannot be saved")


def _unpack(value: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, list):
        return [_unpack(v, arrays) for v in value]
    if not isinstance(value, dict):
        return value
    if "__array__" in value:
        return arrays[f"{value['__array__']}.npy"]
    return {k: _unpack(v, arrays) for k, v in value["__dict__"].items()}


MAX_HEADER = 1 << 16


class NpyHeader(NamedTuple):
    """What an .npy header states; `start` is where the values begin."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    start: int

    @property
    def size(self) -> int:
        """Bytes of all values."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_npy_header(file: IO[bytes]) -> NpyHeader:
    """Read the header of an .npy file; ValueError if it is damaged."""
    start = file.tell()
    try:
        shape, fortran, dtype = _stated(file)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, struct.error) as error:
        raise ValueError(f"damaged .npy header: {str(error)[:200] or 'too deep'}") from None
    return NpyHeader(shape, fortran, dtype, file.tell() - start)


def _stated(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy_format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"format version {version} is unknown")
    form = "<H" if version == (1, 0) else "<I"
    (length,) = struct.unpack(form, file.read(struct.calcsize(form)))
    if length > MAX_HEADER:
        raise ValueError(f"a header of {length} bytes")
    return _parsed(file.read(length).decode("utf-8" if version == (3, 0) else "latin-1"))


@lru_cache(maxsize=64)  # many files have the same header
def _parsed(text: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    stated = ast.literal_eval(text)
    if not isinstance(stated, dict) or stated.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError(f"it states {text[:80]!r}")
    shape, fortran = stated["shape"], stated["fortran_order"]
    if not isinstance(shape, tuple) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"shape {str(shape)[:80]}")
    if not isinstance(fortran, bool):
        raise ValueError(f"fortran_order {str(fortran)[:80]}")
    return shape, fortran, npy_format.descr_to_dtype(stated["descr"])


def decode_npy(content: bytes) -> NDArray[Any]:
    """Return the array of an .npy file's content, without copying its values."""
    header = read_npy_header(io.BytesIO(content))
    if header.dtype.hasobject:
        raise ValueError(f"the .npy file holds Python objects ({header.dtype})")
    size = len(content) - header.start
    if header.size != size:
        raise ValueError(f"the .npy header claims {header.size} bytes of values; there are {size}")
    values = np.frombuffer(content, header.dtype, math.prod(header.shape), header.start)
    return values.reshape(header.shape, order="F" if header.fortran else "C")


MAX_TOML_BYTES = 1 << 22  # the parser's memory grows with size times depth
MAX_TOML_DEPTH = 32
_KEY = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_DEEP_KEY = re.compile(rf"{_KEY}(?:[ \t]*\.[ \t]*{_KEY}){{{MAX_TOML_DEPTH}}}")


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a TOML file that may come from anybody; ConfigError names the file."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_TOML_BYTES + 1)
        if len(content) > MAX_TOML_BYTES:
            raise ConfigError(f"{path}: more than {MAX_TOML_BYTES >> 20} MiB of TOML")
        text = content.decode()
        if _DEEP_KEY.search(text):
            raise ConfigError(f"{path}: a key of more than {MAX_TOML_DEPTH} parts")
        return tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {str(error)[:200] or 'nested too deep'}") from None
