"""Models on disk, each under the hash of its content, in the safetensors format.

A file is written beside its place and renamed when it is whole, so a name that exists has its
content; two clients with the same model share one file. Paths are made of hashes alone, never of
what a user names a client.

What goes into a registry, and what it tells about a client.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.rounds import ClientId
from fedcohort.sketch.race import RaceSketch

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


COLUMNS = "id, n, epsilon, model, reference, metadata, registered"


@dataclass(frozen=True)
class Record:
    """What is registered.

    Parameters
    ----------
    client : str
        Any text.
    sketch : RaceSketch
        Of at least two samples, exact or private, and like all others of the registry.
    model : mapping or path, optional
        Named arrays, or a safetensors file that is copied.
    reference : str, optional
        In place of `model`: where it lies elsewhere, a path or URI. Kept as text, never opened.
    metadata : mapping
        Whatever JSON can hold.
    """

    client: ClientId
    sketch: RaceSketch
    model: Model | None = None
    reference: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse what cannot be registered."""
        check_text("client id", self.client)
        if not isinstance(self.sketch, RaceSketch):
            raise ConfigError(f"client {self.client!r}: {type(self.sketch).__name__} is no sketch")
        check_size(f"client {self.client!r}", self.sketch)
        if (self.model is None) == (self.reference is None):
            raise ConfigError(f"client {self.client!r}: give a model or a reference to one")
        if self.reference is not None:
            check_text("reference", self.reference)

    def row(self, model: str | None) -> tuple[Any, ...]:
        """Return the values of `COLUMNS`; `model` is the hash of the stored model."""
        release = self.sketch.release
        return (
            self.client,
            float(self.sketch.n),
            None if release is None else release.epsilon,
            model,
            self.reference,
            to_json(dict(self.metadata), f"metadata of client {self.client!r}"),
            datetime.now(UTC).isoformat(timespec="seconds"),
        )


@dataclass(frozen=True)
class Entry:
    """What the registry tells about a client.

    Parameters
    ----------
    client : str
    n : float
        Samples behind the sketch.
    epsilon : float or None
        Privacy of the sketch, None if it is exact.
    model : str or None
        SHA-256 of the stored model.
    reference : str or None
        Where the model lies if it is not stored here.
    metadata : dict
    registered : str
        Date and time in UTC.
    """

    client: ClientId
    n: float
    epsilon: float | None
    model: str | None
    reference: str | None
    metadata: dict[str, Any]
    registered: str

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> Entry:
        """Read the values of `COLUMNS`."""
        client, n, epsilon, model, reference, metadata, registered = row
        try:
            known = json.loads(metadata)
        except (ValueError, TypeError):
            raise DataError(f"client {client!r}: its metadata is no JSON") from None
        return cls(client, n, epsilon, model, reference, known, registered)


def check_size(whose: str, sketch: RaceSketch) -> None:
    """Refuse sketches too small for the share of sampling noise in a distance to be known."""
    if not sketch.n >= 2:
        raise ConfigError(
            f"{whose}: a sketch of n={sketch.n:g} samples cannot be compared; sketch two or more"
        )


def check_text(what: str, value: object) -> None:
    """Refuse what is no text that a file can hold."""
    if not isinstance(value, str):
        raise ConfigError(f"{what}: {value!r} is no text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what}: {value!r} is no valid Unicode") from None


def to_json(value: Any, what: str) -> str:
    """Return a value as JSON, or say whose value cannot be."""
    try:
        text = json.dumps(value, allow_nan=False, sort_keys=True)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what} is no JSON: {error}") from None
    return text
