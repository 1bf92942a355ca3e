"""Compare the results of a suite with published ones, seed by seed.

A few seeds of a part are enough, because seeds do not depend on each other. On the same code the
runs are the same, up to rounding: other hardware, and other seeds side by side, add in another
order. A policy that looks at losses or models may then pick another client, and the run takes
another way from there; it must still agree within the spread over seeds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.exceptions import DataError
from fedcohort.experiments import config
from fedcohort.experiments.results import read_json
from fedcohort.experiments.suite import Part, Script

SAME, OTHER_BYTES, AGREES, DIFFERS = "same", "other bytes", "agrees", "differs"

ROUNDING = 0.01  # largest difference of accuracy between runs that take the same way
STANDARD_ERRORS = 3.0  # between the means of runs that agree

Published = Mapping[tuple[str, str], Mapping[str, Any]]
Twins = tuple[Part, Mapping[str, Any]]


@dataclass(frozen=True)
class Repetition:
    """One part beside the published one, over the seeds that both have.

    Parameters
    ----------
    setting, variant : str
        The part.
    seeds : int
        How many seeds were compared.
    same_cohorts : int
        Seeds whose cohorts have the same label skew (GEMD) and spread over clients.
    accuracy, published_accuracy : float
        Mean over the seeds of the accuracy over the last rounds.
    largest : float
        Largest difference between two accuracies of the same seed and round.
    bytes : float
        Bytes sent, relative to the published ones.
    verdict : {"same", "other bytes", "agrees", "differs"}
        "same" if all cohorts are the same and accuracies differ by rounding only; "other bytes" if
        the ledger charges for something else; "agrees" if the mean accuracies are within three
        standard errors, taken from the published spread over seeds.
    """

    setting: str
    variant: str
    seeds: int
    same_cohorts: int
    accuracy: float
    published_accuracy: float
    largest: float
    bytes: float
    verdict: str


def read_published(paths: Sequence[str | os.PathLike[str]]) -> Published:
    """Return the parts of published result files, by setting and variant.

    A part may have some of its seeds in each of several files; the first result of a seed counts.
    """
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for path in paths:
        try:
            for part in read_json(Path(path))["parts"]:
                first = found.setdefault((part["setting"], part["variant"]), part)
                known = {row["seed"] for row in first.get("seeds", ())}
                more = [row for row in part.get("seeds", ()) if row["seed"] not in known]
                if more:
                    merged = {**first, "seeds": [*first["seeds"], *more]}
                    found[part["setting"], part["variant"]] = merged
        except (KeyError, TypeError, AttributeError):
            message = f"{path} is not a result file of `fedcohort benchmark --join`"
            raise DataError(message) from None
    return found


def twins(parts: Sequence[Part], published: Published) -> list[Twins]:
    """Return the training runs among the parts that are published, each with its published result.

    DataError if one was published with other settings, or if there is nothing to compare.
    """
    found = []
    for part in parts:
        theirs = published.get((part.setting, part.variant))
        if theirs is None or isinstance(part.experiment, Script):
            continue
        seeds, device = part.experiment.seeds, part.experiment.device
        old = replace(config.parse(theirs["experiment"]), seeds=seeds, device=device)
        if old != part.experiment:
            raise DataError(f"{part.name} was published with other settings (--quick changes them)")
        found.append((part, theirs))
    if not found:
        raise DataError("these parts are not published training runs: nothing to compare with")
    return found


def repetitions(pairs: Sequence[Twins], folder: str | os.PathLike[str]) -> list[Repetition]:
    """Compare the parts whose result the folder holds with the published ones."""
    found = []
    for part, theirs in pairs:
        path = Path(folder) / part.file_name
        if path.exists():
            try:
                found.append(compare(read_json(path), theirs))
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(
                    f"{part.name}: the published result is damaged ({error!r})"
                ) from None
    return found


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Repetition:
    """Compare a part's result with the published one, over the seeds that both have."""
    old = {row["seed"]: row for row in theirs["seeds"]}
    new = [row for row in ours["seeds"] if row["seed"] in old]
    if not new:
        raise DataError(f"{ours['setting']}, {ours['variant']}: none of its seeds is published")
    published = [old[row["seed"]] for row in new]
    pairs = list(zip(new, published, strict=True))
    same = sum(_same_cohorts(a, b) for a, b in pairs)
    largest = float(np.max([_largest(a, b) for a, b in pairs]))
    sent, due = (sum(r["bytes_up"] + r["bytes_down"] for r in rows) for rows in (new, published))
    here, there = (float(np.mean([r["accuracy"] for r in rows])) for rows in (new, published))
    if same == len(pairs) and largest <= ROUNDING:
        verdict = SAME if sent == due else OTHER_BYTES
    else:
        error = _standard_error([row["accuracy"] for row in theirs["seeds"]], len(pairs))
        verdict = AGREES if abs(here - there) <= STANDARD_ERRORS * error else DIFFERS
    return Repetition(
        ours["setting"],
        ours["variant"],
        len(pairs),
        same,
        here,
        there,
        largest,
        sent / due if due else math.nan,
        verdict,
    )


def _same_cohorts(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two runs had the same cohorts, judged by two numbers that depend on all of them."""
    names = ("gemd", "participation_entropy")
    return all(math.isclose(a[name], b[name], rel_tol=1e-9) for name in names)


def _largest(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Return the largest difference of two curves, over the rounds that were evaluated.

    Curves of suites that keep other rounds cannot be compared: the best and last accuracy then are.
    """
    one, other = a["curve"], b["curve"]
    if len(one) != len(other):
        names = ("accuracy", "best_accuracy", "last_accuracy")
        one, other = ([row[name] for name in names] for row in (a, b))
    pairs = zip(one, other, strict=True)
    known = [abs(x - y) for x, y in pairs if x is not None and y is not None]
    return float(np.max(known)) if known else 0.0  # NaN, if there is one


def _standard_error(accuracies: Sequence[float], seeds: int) -> float:
    """Return the standard error of a difference between two means of so many seeds."""
    if len(accuracies) < 2:
        return 0.0
    return float(np.std(accuracies, ddof=1)) * math.sqrt(2 / seeds)
