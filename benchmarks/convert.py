"""Build the files of FEMNIST and Shakespeare from what is published.

python benchmarks/convert.py femnist leaf/data/femnist/data --root ~/data
python benchmarks/convert.py shakespeare shakespeare --root ~/data

The source is the data folder that LEAF's `preprocess.sh` writes, or the Complete
Moby Shakespeare with one folder per play. `fedcohort.datasets.load` reads what this writes.
"""

from __future__ import annotations

import gzip
import html
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from script import arguments

from fedcohort.datasets.published import PLAYS_HEADER
from fedcohort.exceptions import DataError
from fedcohort.registry import lookup
from fedcohort.storage import write_atomically

PIXELS, CLASSES = 28 * 28, 62

Bytes = NDArray[np.uint8]


def femnist_from_leaf(source: Path, target: Path, min_images: int = 20) -> Path:
    """Write `femnist.npz` from a LEAF folder with `train` and `test`.

    LEAF adds the first image of each writer twice; an image that a writer has already is dropped.
    Writers with fewer than `min_images` images are left out. Rows are sorted by writer; pixels are
    stored as bytes, from which LEAF's floats come back exactly.
    """
    images: dict[str, list[tuple[Bytes, int, bool]]] = {}
    for name in ("train", "test"):
        folder = source / name
        paths = sorted(folder.glob("*.json"))
        if not paths:
            raise DataError(f"{folder} has no JSON file: give the folder that LEAF calls data")
        for path in paths:
            for writer, pixels, label in _leaf_rows(path):
                images.setdefault(writer, []).append((pixels, label, name == "test"))
    kept = {w: found for w in sorted(images) if len(found := _once(images[w])) >= min_images}
    if not kept:
        raise DataError(f"{source}: no writer has {min_images} images")
    rows = [row for found in kept.values() for row in found]
    return _save(
        target / "femnist.npz",
        images=np.stack([image for image, _, _ in rows]).reshape(-1, 28, 28),
        labels=np.array([label for _, label, _ in rows], np.uint8),
        writers=np.repeat(np.arange(len(kept), dtype=np.uint16), [len(f) for f in kept.values()]),
        writer_ids=np.array(list(kept)),
        is_test=np.array([is_test for _, _, is_test in rows], bool),
    )


def _leaf_rows(path: Path) -> Iterator[tuple[str, Bytes, int]]:
    """Yield writer, pixels and label of each image of one file."""
    held = json.loads(path.read_text(encoding="utf-8"))
    for writer in held["users"]:
        part = held["user_data"][writer]
        for x, label in zip(part["x"], part["y"], strict=True):
            pixels = np.rint(255 * np.asarray(x, np.float64)).astype(np.uint8)
            if pixels.shape != (PIXELS,) or not 0 <= label < CLASSES:
                raise DataError(f"{path}: an image of {writer} has {len(x)} pixels, label {label}")
            yield str(writer), pixels, label


def _once(rows: list[tuple[Bytes, int, bool]]) -> list[tuple[Bytes, int, bool]]:
    """Drop images that the writer has already; those of the training part come first."""
    seen: dict[tuple[bytes, int], tuple[Bytes, int, bool]] = {}
    for pixels, label, is_test in rows:
        seen.setdefault((pixels.tobytes(), label), (pixels, label, is_test))
    return list(seen.values())


def _save(path: Path, **arrays: NDArray[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    write_atomically(path, content.getvalue())
    return path


def shakespeare_from_html(source: Path, target: Path) -> Path:
    """Write `plays.tsv.gz` from the `full.html` of each play, named after its folder.

    Speakers are in capitals. Stage directions and lines without a speaker are left out.
    """
    pages = sorted(source.glob("*/full.html"))
    if not pages:
        raise DataError(f"{source} has no PLAY/full.html: give the folder that holds the plays")
    rows = [PLAYS_HEADER]
    for page in pages:
        rows += ["\t".join((page.parent.name, *line)) for line in _speeches(page)]
    path = target / "plays.tsv.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(rows) + "\n"
    write_atomically(path, gzip.compress(text.encode("utf-8"), mtime=0))
    return path


_SPEECH = re.compile(
    r"<a\s+name=\"?speech\d+\"?\s*>\s*<b>(?P<speaker>.*?)</b>\s*</a>"
    r"|<a\s+name=\"?(?P<line>\d[\d.]*)\"?\s*>(?P<text>.*?)</a>",
    re.IGNORECASE | re.DOTALL,
)


def _speeches(page: Path) -> Iterator[tuple[str, str, str]]:
    """Yield speaker, number and text of each line of a play."""
    speaker = ""
    for match in _SPEECH.finditer(page.read_text(encoding="utf-8", errors="replace")):
        if match["speaker"] is not None:
            speaker = _plain(match["speaker"]).upper()
        elif speaker and (line := _plain(match["text"])):
            yield speaker, match["line"], line
    if not speaker:
        raise DataError(f"{page}: it has no speech; save the page of a whole play")


def _plain(markup: str) -> str:
    """Return the text of a piece of HTML, blanks collapsed."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", "", markup)).split())


CONVERTERS = {"femnist": femnist_from_leaf, "shakespeare": shakespeare_from_html}


def main() -> None:
    args = arguments(__doc__, "name", "source", root="data")
    convert = lookup("data set", args.name, CONVERTERS)
    print(convert(Path(args.source), Path(args.root) / args.name))


if __name__ == "__main__":
    main()
