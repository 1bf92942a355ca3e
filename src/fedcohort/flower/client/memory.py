"""What a client remembers between messages, in Flower's `Context.state`.

The state lives in memory only and can be lost. The client then replies with an error, or works from
what it is sent.
"""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict

from fedcohort.exceptions import DataError
from fedcohort.flower.wire import Flat

NOTES, MODEL, HELD, UPDATE = (f"fedcohort.{n}" for n in ("notes", "model", "held", "update"))


class Memory:
    """The client's own records in its context; what another `run` left behind is forgotten."""

    def __init__(self, context: Context, run: str = "") -> None:
        self.state: RecordDict = context.state
        if self.notes.get("run", "") != run:
            for name in [key for key in self.state if key.startswith("fedcohort.")]:
                del self.state[name]
            self.notes["run"] = run

    @property
    def notes(self) -> ConfigRecord:
        """Versions and round numbers."""
        if NOTES not in self.state:
            self.state[NOTES] = ConfigRecord()
        return self.state.config_records[NOTES]

    def keep_model(self, arrays: ArrayRecord, version: str) -> None:
        """Keep the global model, so that it need not be sent again."""
        self.state[MODEL] = arrays
        self.notes["version"] = version

    def model(self, version: str) -> ArrayRecord:
        """Return the global model of a version; DataError if it is not here."""
        held = self.notes.get("version", "")
        if held != version or MODEL not in self.state:
            raise DataError(f"no model in the message; the client holds {held!r}, not {version!r}")
        return self.state.array_records[MODEL]

    def keep_vector(self, name: str, flat: Flat, round_number: int) -> None:
        """Keep a flat vector, stamped with its round."""
        self.state[f"{HELD}.{name}"] = ArrayRecord({"0": Array(np.ascontiguousarray(flat))})
        self.notes[name] = round_number

    def vector(self, name: str) -> Flat | None:
        """Return a vector that was kept, if there is one."""
        record = self.state.array_records.get(f"{HELD}.{name}")
        return None if record is None else np.asarray(record["0"].numpy(), np.float32)

    def stamp(self, name: str) -> int:
        """Return the round that a vector was kept in, -1 if there is none."""
        return int(self.notes.get(name, -1))  # type: ignore[arg-type]

    def forget(self, name: str) -> None:
        """Drop a vector."""
        self.state.pop(f"{HELD}.{name}", None)
        self.notes.pop(name, None)

    def keep_update(self, content: RecordDict, round_number: int) -> None:
        """Keep a finished update until the server asks for it, or trains again."""
        self.drop_update()
        self.notes["update"] = round_number
        for name, record in content.items():
            self.state[f"{UPDATE}.{name}"] = record

    def update(self, round_number: int) -> RecordDict:
        """Return the update of a round; DataError if it is not here."""
        if self.notes.get("update") != round_number:
            raise DataError(f"no update of round {round_number} is stored for an upload")
        start = len(UPDATE) + 1
        kept = {k[start:]: v for k, v in self.state.items() if k.startswith(f"{UPDATE}.")}
        return RecordDict(kept)

    def drop_update(self) -> None:
        """Forget the update."""
        self.notes.pop("update", None)
        for name in [k for k in self.state if k.startswith(f"{UPDATE}.")]:
            del self.state[name]
