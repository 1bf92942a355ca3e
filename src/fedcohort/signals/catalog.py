"""The signals a policy may ask for, and when it asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedcohort.registry import lookup

Work = Literal["server", "data", "forward", "train"]


@dataclass(frozen=True)
class Signal:
    """One kind of reading.

    Parameters
    ----------
    name : str
        Unique; a Flower federation sends it as the message type ``query.<name>``.
    work : {"server", "data", "forward", "train"}
        What producing it costs. ``server``: computed from updates that arrive anyway, no bytes.
        ``data``: one pass over the client's data. ``forward`` and ``train`` need the current
        model, so the model is downloaded first.
    about : str
        One line for people.
    """

    name: str
    work: Work
    about: str

    @property
    def needs_model(self) -> bool:
        """Whether the client must hold the current model to answer."""
        return self.work in ("forward", "train")


SIGNALS: dict[str, Signal] = {
    signal.name: signal
    for signal in (
        Signal("num_examples", "data", "how many examples the client trains on"),
        Signal("race_sketch", "data", "the client's distribution sketch, private if it so decides"),
        Signal("insight", "data", "a vector of the user's own that says what the data look like"),
        Signal("feature_profile", "forward", "mean output of the first dense layer"),
        Signal("loss", "forward", "mean loss of the current model over all local data"),
        Signal("loss_rms", "forward", "root mean square of the per-example losses, all local data"),
        Signal("model_sketch", "train", "projection of the locally trained model or of its step"),
        Signal("gradient_sketch", "train", "projection of the full-batch gradient"),
        Signal("duration", "server", "seconds from sending the model to receiving the update"),
        Signal("update_distance", "server", "distance of the update from the cohort's mean update"),
        Signal("update_sketch", "server", "projection of the update"),
    )
}


@dataclass(frozen=True)
class Needs:
    """The signals of a policy, by when they are collected.

    Parameters
    ----------
    profile : frozenset of str
        Once, when a client is first seen.
    query : frozenset of str
        Before the selection, from the policy's candidates.
    reply : frozenset of str
        With the update, from those that finish.
    """

    profile: frozenset[str] = frozenset()
    query: frozenset[str] = frozenset()
    reply: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in self.profile | self.query | self.reply:
            lookup("signal", name, SIGNALS)
