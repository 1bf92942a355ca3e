"""Models on disk, each under the hash of its content, in the safetensors format.

A file is written beside its place and renamed when it is whole, so a name that exists has its
content; two clients with the same model share one file. Paths are made of hashes alone, never of
what a user names a client.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import DataError

Model = Mapping[str, ArrayLike] | str | os.PathLike[str]
SUFFIX = ".safetensors"
BLOCK = 1 << 20
_DIGEST = re.compile("[0-9a-f]{64}")


class ModelFiles:
    """A folder of models.

    Parameters
    ----------
    folder : Path
        Holds ``ab/abcd....safetensors``, the name being the SHA-256 of the file.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     files = ModelFiles(Path(folder))
    ...     digest = files.put({"w": np.arange(3.0)})
    ...     len(digest), files.load(digest)
    (64, {'w': array([0., 1., 2.])})
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        """Return where a model lies; DataError for what is no hash, so that no path escapes."""
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise DataError(f"{str(digest)[:80]!r} is not the SHA-256 of a model")
        return self.folder / digest[:2] / (digest + SUFFIX)

    def put(self, model: Model) -> str:
        """Store named arrays, or a copy of a safetensors file, and return the hash."""
        self.folder.mkdir(exist_ok=True)
        incoming = self.folder / f"incoming.{secrets.token_hex(8)}"
        try:
            with open(incoming, "xb") as file:
                _write(model, file)
                file.flush()
                os.fsync(file.fileno())
            digest = _file_digest(incoming)
            self._settle(incoming, self.path(digest))
        except BaseException:
            incoming.unlink(missing_ok=True)
            raise
        return digest

    def _settle(self, incoming: Path, target: Path) -> None:
        """Rename a whole file into its place, and make the name last."""
        if not target.parent.is_dir():
            target.parent.mkdir(exist_ok=True)
            _sync_folder(self.folder)
        os.replace(incoming, target)
        _sync_folder(target.parent)

    def load(self, digest: str) -> dict[str, NDArray[Any]]:
        """Read a model, after checking that the file is what its name says."""
        self.verify(digest)
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            arrays: dict[str, NDArray[Any]] = load_file(self.path(digest))
        except (SafetensorError, KeyError, AttributeError, TypeError) as error:
            raise DataError(
                f"{self.path(digest)} cannot be read as NumPy arrays ({error}); "
                "open the file with the library that wrote it"
            ) from error
        return arrays

    def verify(self, digest: str) -> None:
        """Raise DataError unless the file is there and has the content of its name."""
        path = self.path(digest)
        try:
            found = _file_digest(path)
        except FileNotFoundError:
            raise DataError(f"the model file {path} is missing") from None
        if found != digest:
            raise DataError(f"the model file {path} is damaged: its SHA-256 is {found}")

    def discard(self, digest: str) -> None:
        """Remove a model, if it is there."""
        self.path(digest).unlink(missing_ok=True)

    def strays(self, wanted: set[str]) -> Iterator[Path]:
        """Yield the files that are no wanted model: left by a crash, or put there by somebody."""
        known = {self.path(digest) for digest in wanted if _DIGEST.fullmatch(digest)}
        for path in sorted(self.folder.rglob("*")):
            if not path.is_dir() and path not in known:
                yield path


def _write(model: Model, file: Any) -> None:
    if isinstance(model, str | os.PathLike):
        check_safetensors(Path(model))
        with open(model, "rb") as source:
            shutil.copyfileobj(source, file, BLOCK)
    else:
        file.write(pack(model))


def pack(model: Mapping[str, ArrayLike]) -> bytes:
    """Return named arrays as the content of a safetensors file.

    Examples
    --------
    >>> pack({"b": [1.0], "a": [2.0]}) == pack({"a": [2.0], "b": [1.0]})
    True
    """
    from safetensors.numpy import save

    if not model:
        raise ValueError("a model needs at least one array")
    arrays = {}
    for name, values in model.items():
        array = np.asarray(values, order="C")
        if not isinstance(name, str) or array.dtype.kind not in "fiub":
            raise ValueError(f"model: {name!r} must name an array of numbers, not {array.dtype}")
        arrays[name] = array
    content: bytes = save(arrays)
    return content


def check_safetensors(path: Path) -> None:
    """Raise DataError unless a file is in the safetensors format."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            file.keys()
    except FileNotFoundError:
        raise DataError(f"there is no model file {path}") from None
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is no safetensors file: {error}") from None


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut, where the system can."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
