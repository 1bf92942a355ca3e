"""Models as named arrays: stored in files named by their content, compared and averaged.

A file is in the safetensors format and named by the SHA-256 of its content, so two clients with the
same model share one. Paths are made of hashes only, never of client ids.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import DataError
from fedcohort.rounds import ClientId
from fedcohort.storage import SUFFIX as TEMPORARY
from fedcohort.storage import refuse_links, remove_leftovers, sync_folder, write_atomically

Arrays = Mapping[str, NDArray[Any]]
Model = Mapping[str, ArrayLike] | str | os.PathLike[str]
Shapes = dict[str, list[int]]
SUFFIX = ".safetensors"
_DIGEST = re.compile("[0-9a-f]{64}")
_MODEL = re.compile(r"([0-9a-f]{2})/\1[0-9a-f]{62}\.safetensors")
_LEFTOVER = re.compile(
    rf"([0-9a-f]{{2}})/\.\1[0-9a-f]{{62}}\.safetensors\.[0-9a-f]{{16}}{TEMPORARY}"
)


class ModelFiles:
    """A folder of models, ``ab/abcd....safetensors``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        """Return the path of a model; DataError unless `digest` is a SHA-256, or for links."""
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise DataError(f"{str(digest)[:80]!r} is not the SHA-256 of a model")
        path = self.folder / digest[:2] / (digest + SUFFIX)
        refuse_links(self.folder, path.parent, path)
        return path

    def put(self, model: Model) -> str:
        """Store named arrays, or a copy of a safetensors file, and return the hash."""
        if isinstance(model, str | os.PathLike):
            content = Path(model).read_bytes()
        else:
            content = pack(model)
        digest = hashlib.sha256(content).hexdigest()
        path = self.path(digest)
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True)
            sync_folder(self.folder)
        remove_leftovers(path.parent)
        write_atomically(path, content)
        return digest

    def load(self, digest: str) -> dict[str, NDArray[Any]]:
        """Read a model after checking its content against its hash."""
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

    def verify(self, digest: str) -> Path:
        """Return the file's path; DataError unless it has the content that its name states."""
        path = self.path(digest)
        try:
            with open(path, "rb") as file:
                actual = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise DataError(f"the model file {path} is missing") from None
        except OSError as error:
            raise DataError(f"the model file {path} cannot be read: {error}") from None
        if actual != digest:
            raise DataError(f"the model file {path} is damaged: its SHA-256 is {actual}")
        return path

    def unreferenced(self, wanted: set[str]) -> tuple[list[Path], list[Path]]:
        """Return models that are not wanted, or not complete; and what no registry wrote.

        Links are among the latter, and nobody looks behind them.
        """
        orphans, foreign = [], []
        if self.folder.is_symlink():
            return [], [self.folder]
        for root, folders, files in os.walk(self.folder):
            foreign += [p for name in folders if (p := Path(root, name)).is_symlink()]
            for path in (Path(root, name) for name in sorted(files)):
                place = path.relative_to(self.folder).as_posix()
                ours = _MODEL.fullmatch(place)
                if path.is_symlink() or not (ours or _LEFTOVER.fullmatch(place)):
                    foreign.append(path)
                elif not ours or path.stem not in wanted:
                    orphans.append(path)
        return orphans, foreign


def pack(model: Mapping[str, ArrayLike]) -> bytes:
    """Return named arrays as the content of a safetensors file, whatever their order."""
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


def shapes_of(model: Model) -> Shapes:
    """Return the shape of every array; DataError for a file of another format."""
    if not isinstance(model, str | os.PathLike):
        return {name: list(np.shape(values)) for name, values in sorted(model.items(), key=str)}
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(model, "numpy") as file:
            return {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    except FileNotFoundError:
        raise DataError(f"model file {model} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise DataError(f"{model} is not a safetensors file: {error}") from None


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
        if problem := architecture_difference(shapes_of(arrays), shapes_of(expected)):
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
