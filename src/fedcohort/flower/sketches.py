"""A client's distribution sketch: its own epsilon, its own budget, both beyond the server's reach.

The server says how sketches are made (rows, bits, seed), for they must be comparable. What a sketch
may reveal is the client's to decide: it adds its own noise and enters every release into a file of
its own before the sketch leaves. A release is kept in a file as well, so that the same question
gets the same answer and costs nothing, also after a restart.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError
from fedcohort.policies.base import Option
from fedcohort.rounds import ClientId
from fedcohort.signals.budget import BudgetLedger
from fedcohort.signals.race import RaceSketch
from fedcohort.signals.transforms import Transform

MOST_COUNTERS = 1 << 24


@dataclass(frozen=True)
class Privacy:
    """What a client's sketches may reveal.

    Parameters
    ----------
    epsilon, delta : float
        Of one release.
    folder : path
        The client's own: budget and releases are kept there.
    total : float, optional
        Epsilon of all releases together; by default that of one. The total delta is `delta`.
    n : {"public", "private"}
        Whether the number of examples is published as it is.
    """

    epsilon: float
    delta: float = 0.0
    folder: str | os.PathLike[str] = "fedcohort-privacy"
    total: float | None = None
    n: Literal["public", "private"] = "public"

    def release(self, client: ClientId, sketch: RaceSketch) -> RaceSketch:
        """Return the private sketch: the one released before, or a new one out of the budget."""
        folder = Path(self.folder).expanduser()
        path = folder / f"{self._name(client, sketch)}.sketch"
        if path.exists():
            return RaceSketch.load(path)
        folder.mkdir(parents=True, exist_ok=True)
        total = self.epsilon if self.total is None else self.total
        ledger = BudgetLedger(folder / "budget.json", total, self.delta)
        private = ledger.release(client, sketch, self.epsilon, self.delta, n=self.n)
        private.save(path)
        return private

    def _name(self, client: ClientId, sketch: RaceSketch) -> str:
        """Name a release by the client and by how, and of what, the sketch was made.

        The counts are part of it: data that changed need a new release. The name never leaves the
        client's folder.
        """
        settings = [client, sketch.spec, self.epsilon, self.delta, self.n]
        digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
        digest.update(sketch.counts.tobytes())
        return digest.hexdigest()


def sketch(
    x: NDArray[Any],
    y: NDArray[Any] | None,
    options: Mapping[str, Option],
    *,
    classes: int = 0,
    center: NDArray[np.float64] | None = None,
) -> RaceSketch:
    """Sketch a client's examples as the policy's options say.

    Parameters
    ----------
    x, y : array
        Examples and labels.
    options : mapping
        rows, bits, seed, label_weight, center: those of the signal ``race_sketch``.
    classes : int
        Number of labels, where they are hashed.
    center : array, optional
        The public center, where data are centerd.

    Examples
    --------
    >>> sketch(np.eye(4), None, {"rows": 10, "bits": 3})
    RaceSketch(srp, 10 x 8, n=4)
    """
    rows, bits = int(options["rows"]), int(options["bits"])
    if rows < 1 or bits < 1 or bits > 30 or rows << bits > MOST_COUNTERS:
        raise ConfigError(f"a sketch of rows={rows}, bits={bits} is refused: too many counters")
    weight = float(options.get("label_weight", 0.0))
    if bool(options.get("center")) != (center is not None):
        raise ConfigError("a centerd sketch needs the public center, and only that one")
    if weight and classes < 2:
        raise ConfigError(f"label_weight={weight}: pass attach(classes=...), the number of labels")
    flat = np.asarray(x).reshape(len(x), -1)
    transform = Transform(
        center=0.0 if center is None else center,
        unit=True,
        classes=classes if weight else 0,
        label_weight=weight,
    )
    seed = int(options.get("seed", 0))
    out = RaceSketch.srp(flat.shape[1], rows, bits, seed, transform=transform)
    out.add(flat, y if weight else None)
    return out
