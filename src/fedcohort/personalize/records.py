"""What goes into a registry, and what it tells about a client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.personalize.model_files import Model
from fedcohort.rounds import ClientId
from fedcohort.signals.race import RaceSketch

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
