"""UCI Heart Disease: four hospitals, which are the clients (FLamby's Fed-Heart-Disease)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcohort.datasets.base import Dataset, holdout
from fedcohort.datasets.folder import Folder, damaged, read_all
from fedcohort.rounds import stream

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
COLUMNS = 14
HOLDS = (
    "comma-separated rows of age, sex, cp, trestbps, chol, fbs, restecg, thalach, exang, oldpeak, "
    "slope, ca, thal, num, without a header; ? is missing"
)
# Column, name, center and scale. The constants are round clinical values, not statistics of the
# data: standardizing needs no round of communication and gives nothing away.
NUMBERS = (
    (0, "age", 50.0, 10.0),
    (1, "sex", 0.0, 1.0),
    (3, "trestbps", 130.0, 20.0),
    (4, "chol", 200.0, 100.0),
    (5, "fbs", 0.0, 1.0),
    (7, "thalach", 140.0, 25.0),
    (8, "exang", 0.0, 1.0),
    (9, "oldpeak", 1.0, 1.0),
)
# Column, name, values; the first value is the one with all zeros.
CATEGORIES = ((2, "cp", (1, 2, 3, 4)), (6, "restecg", (0, 1, 2)))
FLAGS = (1, 5, 8)
FEATURES = (
    *(name for _, name, _, _ in NUMBERS),
    *(f"{name}={v}" for _, name, values in CATEGORIES for v in values[1:]),
)


def read(folder: Folder) -> Dataset:
    """Read a table of 13 features and whether there is a heart disease (num > 0).

    The columns slope, ca and thal are mostly missing outside Cleveland and are left out; chest
    pain and resting ECG become indicator columns. Rows with another missing value are left out,
    as in FLamby: 740 stay. (A cholesterol of 0, as in all rows of Switzerland, is taken as it
    stands, also as in FLamby.) A third of each hospital's rows of each class, drawn once and for
    all, is for testing.
    """
    tables = [_table(folder.file(f"processed.{h}.data", holds=HOLDS)) for h in HOSPITALS]
    rows = np.concatenate(tables)
    clients = np.repeat(HOSPITALS, [len(table) for table in tables])
    whole = ~np.isnan(rows[:, :10]).any(axis=1)
    rows, clients = rows[whole], clients[whole]
    x, y = _features(rows), (rows[:, 13] > 0).astype(np.int64)
    groups = np.char.add(clients, y.astype(str))
    test = holdout(groups, 1 / 3, stream(0, "heart-disease", "test"))
    return Dataset(
        folder.name, x[~test], y[~test], x[test], y[test], 2, clients[~test], clients[test]
    )


def _table(path: Path) -> NDArray[np.float64]:
    text = read_all(path, 1 << 20, HOLDS).decode("ascii", "replace")
    rows = [line.split(",") for line in text.splitlines() if line.strip()]
    for number, row in enumerate(rows, start=1):
        if len(row) != COLUMNS:
            raise damaged(path, f"row {number} has {len(row)} columns", HOLDS)
    if not rows:
        raise damaged(path, "it is empty", HOLDS)
    try:
        table = np.array([[np.nan if v.strip() == "?" else float(v) for v in r] for r in rows])
    except ValueError as error:
        raise damaged(path, str(error), HOLDS) from error
    _check(path, table)
    return table


def _check(path: Path, table: NDArray[np.float64]) -> None:
    allowed = dict.fromkeys(FLAGS, (0, 1)) | {c: v for c, _, v in CATEGORIES} | {13: range(5)}
    for column, values in allowed.items():
        given = table[:, column]
        wrong = ~np.isin(given, list(values)) & (~np.isnan(given) | (column == 13))
        if wrong.any():
            row = int(np.argmax(wrong))
            raise damaged(path, f"column {column + 1} of row {row + 1} is {given[row]:g}", HOLDS)
    if np.isinf(table).any():
        raise damaged(path, "it has an infinite number", HOLDS)


def _features(rows: NDArray[np.float64]) -> NDArray[np.float32]:
    center = np.array([m for _, _, m, _ in NUMBERS])
    numbers = rows[:, [c for c, _, _, _ in NUMBERS]] - center
    numbers /= np.array([s for _, _, _, s in NUMBERS])
    indicators = [rows[:, c] == v for c, _, values in CATEGORIES for v in values[1:]]
    return np.column_stack([numbers, *indicators]).astype(np.float32)
