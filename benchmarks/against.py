"""Compare the results of a suite with published ones, seed by seed; a few seeds are enough.

On the same code the runs are the same, up to rounding: other hardware, and other seeds side by
side, add in another order. A policy that looks at losses or models may then pick another client,
and the run takes another way from there; it must still agree within the spread over seeds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from suite import Part, published_experiment

from fedcohort.exceptions import DataError
from fedcohort.experiments.results import read_json

SAME, OTHER_BYTES, AGREES, DIFFERS = "same", "other bytes", "agrees", "differs"

ROUNDING = 0.01  # largest difference of accuracy between runs that take the same way
STANDARD_ERRORS = 3.0  # between the means of runs that agree

Published = Mapping[tuple[str, str], Mapping[str, Any]]
Twins = tuple[Part, Mapping[str, Any]]


@dataclass(frozen=True)
class Repetition:
    """One part beside the published one, over the seeds that both have.

    It is the "same" if all cohorts are and accuracies differ by rounding only, with "other bytes"
    if the ledger charges for something else; it "agrees" if the mean accuracies are within three
    standard errors, by the published spread over seeds; otherwise it "differs".
    """

    setting: str
    variant: str
    seeds: int
    same_cohorts: int  # seeds whose cohorts have the same label skew and spread over clients
    accuracy: float  # mean over the seeds, over the last rounds
    published_accuracy: float
    largest: float  # difference between two accuracies of the same seed and round
    bytes: float  # relative to the published ones
    verdict: str


def read_published(paths: Sequence[str | os.PathLike[str]]) -> Published:
    """The parts of published result files, by setting and variant.

    A part may have some of its seeds in each of several files; the first result of a seed counts.
    """
    published: dict[tuple[str, str], Any] = {}
    for path in paths:
        try:
            for part in read_json(Path(path))["parts"]:
                first = published.setdefault((part["setting"], part["variant"]), part)
                if first is not part:
                    rows = [*part.get("seeds", ()), *first.get("seeds", ())]
                    first["seeds"] = list({row["seed"]: row for row in rows}.values())
        except (KeyError, TypeError, AttributeError):
            raise DataError(f"{path} is not a result file of benchmarks/run.py --join") from None
    return published


def twins(parts: Sequence[Part], published: Published) -> list[Twins]:
    """The training runs among the parts that are published, each with its published result.

    DataError if one was published with other settings, or if there is nothing to compare.
    """
    theirs = [(part, published.get((part.setting, part.variant))) for part in parts]
    pairs = [(part, twin) for part, twin in theirs if twin is not None and not part.is_script]
    for part, twin in pairs:
        same = {"seeds": part.experiment.seeds, "device": part.experiment.device}
        if replace(published_experiment(twin["experiment"]), **same) != part.experiment:
            raise DataError(f"{part.name} was published with other settings")
    if not pairs:
        raise DataError("these parts are not published training runs: nothing to compare with")
    return pairs


def repetitions(pairs: Sequence[Twins], folder: Path) -> list[Repetition]:
    """Compare the parts whose result the folder holds with the published ones."""
    paths = [(folder / part.file_name, theirs) for part, theirs in pairs]
    return [compare(read_json(path), theirs) for path, theirs in paths if path.exists()]


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Repetition:
    """Compare a part's result with the published one, over the seeds that both have."""
    by_seed = {row["seed"]: row for row in theirs["seeds"]}
    pairs = [(row, by_seed[row["seed"]]) for row in ours["seeds"] if row["seed"] in by_seed]
    name = ours["setting"], ours["variant"]
    if not pairs:
        raise DataError(f"{', '.join(name)}: none of its seeds is published")
    same = sum(_same_cohorts(a, b) for a, b in pairs)
    largest = float(np.max([_largest(a, b) for a, b in pairs]))
    new, old = zip(*pairs, strict=True)
    sent, due = (sum(r["bytes_up"] + r["bytes_down"] for r in rows) for rows in (new, old))
    here, there = (float(np.mean([r["accuracy"] for r in rows])) for rows in (new, old))
    if same == len(pairs) and largest <= ROUNDING:
        verdict = SAME if sent == due else OTHER_BYTES
    else:
        error = standard_error([row["accuracy"] for row in theirs["seeds"]], len(pairs))
        verdict = AGREES if abs(here - there) <= STANDARD_ERRORS * error else DIFFERS
    share = sent / due if due else math.nan
    return Repetition(*name, len(pairs), same, here, there, largest, share, verdict)


def _same_cohorts(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two runs had the same cohorts, judged by two numbers that depend on all of them."""
    names = ("gemd", "participation_entropy")
    return all(math.isclose(a[name], b[name], rel_tol=1e-9) for name in names)


def _largest(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """The largest difference of two curves, over the rounds that were evaluated.

    Curves of suites that keep other rounds cannot be compared: the best and last accuracy then are.
    """
    curves = [row["curve"] for row in (a, b)]
    if len(curves[0]) != len(curves[1]):
        names = ("accuracy", "best_accuracy", "last_accuracy")
        curves = [[row[name] for name in names] for row in (a, b)]
    gaps = np.abs(np.subtract(*np.array(curves, float)))  # None becomes NaN
    return float(np.nanmax(gaps, initial=0.0))


def standard_error(accuracies: Sequence[float], seeds: int) -> float:
    """The standard error of a difference between two means of so many seeds."""
    if len(accuracies) < 2:
        return 0.0
    return float(np.std(accuracies, ddof=1)) * math.sqrt(2 / seeds)
