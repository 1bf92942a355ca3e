"""A client's distribution sketch, and what it may reveal.

The server says how sketches are made (rows, bits, seed), because they must be comparable. The
client decides what a sketch may reveal: it adds its own noise, and pays for every release from a
budget before the sketch leaves. The same question gets the same answer at no further cost.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError
from fedcohort.flower.client.data import Examples
from fedcohort.flower.wire import LOG
from fedcohort.options import typed
from fedcohort.privacy.budget import BudgetLedger
from fedcohort.privacy.release import Size, noise_for
from fedcohort.rounds import ClientId
from fedcohort.signals.catalog import SIGNALS, Option
from fedcohort.sketch.hashing import MAX_BITS, MAX_CELLS, MinHash
from fedcohort.sketch.race import RaceSketch, empty_sketch, token_sets

SIGNALS_KEY = "fedcohort-signals"
MAX_INPUT = 1e15  # of a private sketch: beyond, numbers count as this
COUNT_METRICS = ("num-examples", "num_examples")


@dataclass(frozen=True)
class Privacy:
    """What a client's sketches may reveal, and where its budget is kept.

    The node config wins over the app: ``fedcohort-epsilon``, ``-delta``, ``-total``, ``-folder``
    and ``-n``.

    Parameters
    ----------
    epsilon, delta : float
        Privacy of one release.
    folder : path
        An absolute folder for the budget and the releases, which belongs to the client.
    total : float, optional
        Epsilon of all releases together; by default that of one. The total delta is `delta`.
    n : {"public", "private"}
        Whether the number of examples is published. If it is private, sketches carry a noisy one,
        signals that count examples are refused, and replies say 1, so that clients weigh the same.
    """

    epsilon: float
    delta: float = 0.0
    folder: str | os.PathLike[str] = "~/.fedcohort/privacy"
    total: float | None = None
    n: Size = "public"

    def __post_init__(self) -> None:
        typed(Size, self.n, "Privacy: n")
        if not Path(self.folder).expanduser().is_absolute():
            raise ConfigError(
                f"Privacy: folder={str(self.folder)!r} must be absolute: a budget that depends on "
                "the working directory starts over in another one"
            )

    @classmethod
    def on_node(cls, context: Context, default: Privacy | None) -> Privacy | None:
        """Return the settings of the node's operator, or else of the app."""
        config: Mapping[str, Any] = context.node_config
        given = {
            name: config[f"fedcohort-{name}"]
            for name in ("epsilon", "delta", "total", "folder", "n")
            if f"fedcohort-{name}" in config
        }
        if not given:
            return default
        before = {} if default is None else vars(default)
        if "epsilon" not in {**before, **given}:
            raise ConfigError("the node config sets a budget but no fedcohort-epsilon")
        settings = {k: str(v) if k in ("folder", "n") else float(v) for k, v in given.items()}
        return cls(**{**before, **settings})

    def release(self, client: ClientId, sketch: RaceSketch) -> RaceSketch:
        """Return the private sketch: the one released before, or a new one out of the budget."""
        folder = Path(self.folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        total = self.epsilon if self.total is None else self.total
        account = hashlib.blake2b(client.encode(), digest_size=8).hexdigest()
        ledger = BudgetLedger(folder / f"budget-{account}.json", total, self.delta)
        content = ledger.charge_and_store(  # and never "delivered": the answer stays the same
            [release := noise_for(sketch.rows, self.epsilon, self.delta, "add-remove")],
            lambda: sketch.privatize(self.epsilon, self.delta, n=self.n).to_bytes(),
            request=self._name(client, sketch),
        )
        spent = ledger.spent()
        LOG.info("a sketch of %s: %s; %g of %g spent", client, release.budget(), spent, total)
        return RaceSketch.from_bytes(content)

    def _name(self, client: ClientId, sketch: RaceSketch) -> str:
        """Name a release by its settings and by the counts: data that changed need a new one."""
        settings = [client, sketch.spec, self.epsilon, self.delta, self.n]
        digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
        digest.update(sketch.counts.tobytes())
        return digest.hexdigest()


def check_covered(name: str, privacy: Privacy | None) -> None:
    """ConfigError if a signal tells of the records past the budget that this client keeps."""
    reveals = SIGNALS[name].reveals
    if privacy is None or reveals in ("nothing", "sketch"):
        return
    if reveals == "records" or privacy.n == "private":
        raise ConfigError(
            f"this client keeps a privacy budget, which does not cover {name!r}: it is not "
            "released; use a policy that selects by race_sketch, such as sketch-match"
        )


def sketch(
    examples: Examples,
    options: Mapping[str, Option],
    *,
    classes: int = 0,
    center: NDArray[np.float64] | None = None,
    private: bool = False,
) -> RaceSketch:
    """Sketch a client's examples as the policy's options say, batch by batch.

    All clients must hash alike, so "auto" is always SRP here; the log says so where inputs look
    like tokens, for which the policy must state ``hash="minhash"``. No example can make a `private`
    sketch fail, because the server would see that: numbers and labels are brought into their range.

    Examples
    --------
    >>> sketch(Examples((np.eye(4), np.arange(4))), {"rows": 10, "bits": 3})
    RaceSketch(srp, 10 x 8, n=4)
    """
    rows, bits = int(options["rows"]), int(options["bits"])
    if not (rows >= 1 and 1 <= bits <= MAX_BITS and rows << bits <= MAX_CELLS):
        raise ConfigError(f"a sketch of rows={rows}, bits={bits} is refused: too many counters")
    result = None
    for x, y in examples:
        numbers = x.astype(np.float32) if x.dtype.kind in "iub" else x
        if result is None:
            result = empty_sketch(options, numbers, classes=classes, center=center)
            tokens = isinstance(result.family, MinHash)
            if not tokens and x.dtype.kind in "iu" and x.ndim == 2 and x.itemsize > 1:
                LOG.warning(
                    "sketch: the inputs are rows of integers, hashed as vectors; if they are "
                    "tokens, give the server's policy hash='minhash'"
                )
        flat: Any = numbers.reshape(len(x), -1)
        if private:
            flat = np.clip(np.nan_to_num(flat.astype(np.float64)), -MAX_INPUT, MAX_INPUT)
            y = np.clip(y, 0, classes - 1) if result.labeled else y
        flat = token_sets(flat, check=not private) if tokens else flat
        result.add(flat, y if result.labeled else None)
    if result is None:
        raise ConfigError("attach(data=...): there are no examples to sketch")
    return result
