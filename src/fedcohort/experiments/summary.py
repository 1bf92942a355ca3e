"""A run's result in a few numbers, and their spread over seeds.

`accuracy` has one meaning in every table and file: the mean test accuracy over the last rounds (see
`Summary`). A run's last and best single rounds are `last_accuracy` and `best_accuracy`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcohort import metrics
from fedcohort.exceptions import ConfigError
from fedcohort.rounds import ClientId
from fedcohort.simulate.history import History

MAX_LAST_ROUNDS = 50  # evaluations that `accuracy` is the mean of


class Overhead(NamedTuple):
    """Traffic in percent of plain FedAvg's traffic over the same rounds (paper 2, section 4.1).

    All traffic counts: models, sketches and flags. The paper does not say who receives FedAvg's
    broadcast, so the downlink is given twice: to the cohort, as the ledger counts it, and to all
    clients, in both methods. `skipped` is the share of rounds in which no model was uploaded.
    """

    skipped: float
    up: float
    down: float
    down_to_all: float


class Summary(NamedTuple):
    """The result of one seed of a run.

    Attributes
    ----------
    seed, rounds : int
        The seed, and the number of rounds.
    accuracy, accuracy_deviation : float
        Mean and standard deviation of the test accuracy over the last 50 evaluated rounds, or
        over the last fifth if fewer than 250 rounds were evaluated.
    last_accuracy, best_accuracy, mean_accuracy : float
        Test accuracy of the last evaluated round, of the best round, and the mean over all
        rounds: the area under the curve.
    rounds_to_target, seconds_to_target : int and float, or None
        Rounds and simulated seconds until the target accuracy was first reached; None if it was
        not, or if there is none.
    gemd : float
        Group earth mover's distance (paper 4, eq. 15), mean over the cohorts.
    participation_entropy : float
        1 if all clients took part equally often, 0 if one client did all the work.
    bytes_up, bytes_down : int
        Bytes of all messages in all rounds.
    bytes_by_kind : dict
        The same bytes by kind of message and direction.
    overhead : Overhead
        Traffic relative to FedAvg.
    """

    seed: int
    rounds: int
    accuracy: float
    accuracy_deviation: float
    last_accuracy: float
    best_accuracy: float
    mean_accuracy: float
    rounds_to_target: int | None
    seconds_to_target: float | None
    gemd: float
    participation_entropy: float
    bytes_up: int
    bytes_down: int
    bytes_by_kind: dict[str, int]
    overhead: Overhead

    def as_dict(self) -> dict[str, Any]:
        """Return the summary for JSON: nested dictionaries, None for what is not finite."""
        return _finite({**self._asdict(), "overhead": self.overhead._asdict()})  # type: ignore[no-any-return]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summarize(
    history: History,
    clients: Sequence[ClientId],
    label_counts: NDArray[np.int64],
    target: float | None,
    model_bytes: int,
    bytes_by_kind: Mapping[str, int] | None = None,
) -> Summary:
    """Summarize one seed's rounds; the run may have been read from disk and be unfinished.

    What cannot be known is NaN: GEMD without label counts, overheads without the size of a model
    or, for `down_to_all`, without `bytes_by_kind`.

    Parameters
    ----------
    history : History
        The rounds.
    clients, label_counts : sequence of str, array (clients, classes)
        Who holds which labels, for `gemd`.
    target : float or None
        Accuracy to reach.
    model_bytes : int
        Size of one model, for `overhead`.
    bytes_by_kind : mapping, optional
        Bytes of the whole run by kind and direction, as in "model down".
    """
    accuracy = history.accuracy
    measured = accuracy[np.isfinite(accuracy)]
    measured = measured if len(measured) else np.array([np.nan])
    last = measured[-min(MAX_LAST_ROUNDS, max(1, len(measured) // 5)) :]
    seconds = [r.seconds for r in history.rounds]
    return Summary(
        seed=history.seed,
        rounds=len(history.rounds),
        accuracy=float(last.mean()),
        accuracy_deviation=float(last.std()),
        last_accuracy=float(last[-1]),
        best_accuracy=float(measured.max()),
        mean_accuracy=float(measured.mean()),
        rounds_to_target=None if target is None else metrics.rounds_to_target(accuracy, target),
        seconds_to_target=(
            None if target is None else metrics.time_to_target(accuracy, seconds, target)
        ),
        gemd=spread(gemd_by_round(history, clients, label_counts)).mean,
        participation_entropy=metrics.participation_entropy(
            metrics.participation(history.selections, clients)
        ),
        bytes_up=sum(r.bytes_up for r in history.rounds),
        bytes_down=sum(r.bytes_down for r in history.rounds),
        bytes_by_kind=dict(bytes_by_kind or {}),
        overhead=_overhead(history, bytes_by_kind, len(clients), model_bytes),
    )


def gemd_by_round(
    history: History, clients: Sequence[ClientId], label_counts: NDArray[np.int64]
) -> list[float]:
    """Return the GEMD of each round's finished clients, NaN if none finished.

    It is also NaN where the labels are unknown, that is where `label_counts` has no column.
    """
    position = {client: i for i, client in enumerate(clients)}
    try:
        cohorts = [[position[c] for c in r.finished] for r in history.rounds]
    except KeyError as error:
        name = error.args[0]
        raise ConfigError(f"a round lists client {name!r:.80}, which is not a member") from None
    labeled = label_counts.shape[1] > 0
    return [metrics.gemd(label_counts, c) if labeled and c else float("nan") for c in cohorts]


def _overhead(
    history: History, kinds: Mapping[str, int] | None, clients: int, model_bytes: int
) -> Overhead:
    """Compare a run's traffic with that of FedAvg with equally large cohorts."""
    rounds, nan = len(history.rounds), float("nan")
    skipped = sum(r.skipped for r in history.rounds)
    up, down = (sum(getattr(r, f"bytes_{w}") for r in history.rounds) for w in ("up", "down"))
    fedavg = sum(len(r.selected) for r in history.rounds) * model_bytes or nan
    small = nan if kinds is None else down - kinds.get("model down", 0)
    broadcast = (rounds - skipped) * clients * model_bytes
    return Overhead(
        skipped=100 * skipped / rounds,
        up=100 * up / fedavg,
        down=100 * down / fedavg,
        down_to_all=100 * (broadcast + small) / (rounds * clients * model_bytes or nan),
    )


class Spread(NamedTuple):
    """Mean and sample standard deviation over seeds.

    `std` is NaN for fewer than two values. `missing` counts the seeds without a value.
    """

    mean: float
    std: float
    missing: int


def spread(values: Sequence[float | None]) -> Spread:
    """Return the mean and sample standard deviation of the values that are finite.

    Examples
    --------
    >>> spread([1.0, 3.0, None])
    Spread(mean=2.0, std=1.4142135623730951, missing=1)
    >>> spread([1.0])
    Spread(mean=1.0, std=nan, missing=0)
    """
    finite = [v for v in values if v is not None and np.isfinite(v)]
    missing = len(values) - len(finite)
    mean = float(np.mean(finite)) if finite else float("nan")
    std = float(np.std(finite, ddof=1)) if len(finite) > 1 else float("nan")
    return Spread(mean, std, missing)
