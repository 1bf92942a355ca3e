"""Columns of a record batch as what sketches take: vectors, texts, sets, labels, client ids.

Each function returns the values of all rows and which rows to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import DataError
from fedcohort.files.source import Nulls, Place, fill, missing_value
from fedcohort.files.table_file import need_pyarrow

Bools = NDArray[np.bool_]


def vectors(
    columns: Sequence[Any], widths: Sequence[int], place: Place, nulls: Nulls
) -> tuple[NDArray[Any], Bools]:
    """Return numbers, booleans and lists of `widths` numbers as float64 (n, sum of widths)."""
    out = np.full((len(columns[0]), sum(widths)), np.nan)
    start = 0
    for name, column, width in zip(place.names, columns, widths, strict=True):
        if "list" in str(column.type):
            _spread(column, out[:, start : start + width], name, place)
        else:
            out[:, start] = _floats(column)
        start += width
    names = [n for n, width in zip(place.names, widths, strict=True) for _ in range(width)]
    return fill(out, place._replace(names=names), nulls)


def _spread(column: Any, out: NDArray[Any], name: str, place: Place) -> None:
    """Write lists of equal length into `out`; rows without a list stay as they are."""
    known = column.is_valid().to_numpy(zero_copy_only=False)
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    wrong = known & (lengths != out.shape[1])
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DataError(
            f"{place.path}: column {name!r}, row {place.first + row}: a list of "
            f"{lengths[row]:g} numbers, not {out.shape[1]}"
        )
    out[known] = _floats(column.drop_null().flatten()).reshape(-1, out.shape[1])


def texts(column: Any, name: str, place: Place, nulls: Nulls) -> tuple[list[Any], Bools]:
    """Return texts; a missing one that counts as zero is the empty text."""
    return _filled(_as_text(column), "", name, place, nulls)


def token_lists(column: Any, name: str, place: Place, nulls: Nulls) -> tuple[list[Any], Bools]:
    """Return lists of tokens; a missing one that counts as zero is the empty set."""
    rows, keep = _filled(column.to_pylist(), [], name, place, nulls)
    for row, tokens in enumerate(rows):
        if keep[row] and not all(isinstance(t, (str, int)) for t in tokens):
            raise DataError(
                f"{place.path}: column {name!r}, row {place.first + row}: a token must be text or "
                "a whole number"
            )
    return rows, keep


def value_sets(columns: Sequence[Any], place: Place, nulls: Nulls) -> tuple[list[Any], Bools]:
    """Return rows as sets of ``column=value``; a missing value that counts as zero is absent."""
    keep = np.ones(len(columns[0]), bool)
    sets: list[list[str]] = [[] for _ in keep]
    for name, column in zip(place.names, columns, strict=True):
        values, known = _filled(_as_text(column, True), None, name, place, nulls)
        keep &= known
        for tokens, value in zip(sets, values, strict=True):
            if value is not None:
                tokens.append(f"{name}={value}")
    return sets, keep


def labels(column: Any, name: str, place: Place, nulls: Nulls) -> tuple[NDArray[np.int64], Bools]:
    """Return whole numbers; a missing label never counts as zero."""
    values = _floats(column)
    known = ~np.isnan(values)
    if not known.all() and nulls != "drop":
        raise missing_value(place, repr(name), int(np.argmin(known)))
    values = np.where(known, values, 0)
    whole = (values == np.floor(values)) & (values >= 0) & (values < 2**53)
    if not whole.all():
        row = int(np.argmin(whole))
        raise DataError(
            f"{place.path}: column {name!r}, row {place.first + row}: label {values[row]:g}; "
            "labels must be whole numbers from 0"
        )
    return values.astype(np.int64), known


def client_ids(
    column: Any, name: str, place: Place, nulls: Nulls
) -> tuple[NDArray[np.object_], Bools]:
    """Return names of clients; a missing one is an error unless its row is dropped."""
    values = _as_text(column, True)
    known = np.array([value is not None for value in values], bool)
    if not known.all() and nulls != "drop":
        raise missing_value(place, repr(name), int(np.argmin(known)))
    ids = np.empty(len(values), object)
    ids[:] = values
    return ids, known


def _filled(
    values: list[Any], zero: Any, name: str, place: Place, nulls: Nulls
) -> tuple[list[Any], Bools]:
    known = np.array([value is not None for value in values], bool)
    if known.all():
        return values, known
    if nulls == "error":
        raise missing_value(place, repr(name), int(np.argmin(known)))
    filled = [zero if value is None else value for value in values]
    return filled, known if nulls == "drop" else np.ones(len(values), bool)


def _floats(column: Any) -> NDArray[np.float64]:
    """Return a column as numbers, NaN where there is none."""
    plain = _plain(column).cast(need_pyarrow().float64(), safe=False)
    values: NDArray[np.float64] = plain.to_numpy(zero_copy_only=False)
    return values


def _as_text(column: Any, empty_is_missing: bool = False) -> list[str | None]:
    values: list[str | None] = _plain(column).cast(need_pyarrow().string()).to_pylist()
    return [value or None for value in values] if empty_is_missing else values


def _plain(column: Any) -> Any:
    """Unpack a column of categories to its values."""
    is_dictionary = need_pyarrow().types.is_dictionary(column.type)
    return column.dictionary_decode() if is_dictionary else column
