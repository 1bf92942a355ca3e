"""What clients tell: each signal is one object, with all that anybody must know about it.

A signal states when it is collected, what it costs a client, which model it needs, what it reveals,
what to do where it is missing, the form of its readings, and the function that computes it. Nobody
else branches on the names of signals. `register_signal` adds one of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import ConfigError
from fedcohort.options import Range, typed
from fedcohort.privacy.noise import discrete_laplace, laplace_scale, words
from fedcohort.registry import lookup
from fedcohort.rounds import ClientId
from fedcohort.signals.forms import MAX_COUNT, Form, Numbers, Sketch
from fedcohort.signals.projection import Vectors
from fedcohort.sketch.hashing import MAX_BITS

When = Literal["profile", "query", "reply"]
Work = Literal["server", "data", "forward", "train"]
Which = Literal["none", "initial", "current"]
Reveals = Literal["nothing", "size", "sketch", "records"]
Option = int | float | str | bool
Options = Mapping[str, Option]
HistogramEpsilon = Literal[0] | Annotated[float, Range(0.001)]  # 0 is exact; less is mere noise


class Clients:
    """Some clients as an engine shows them to a signal: results are rows, one per client.

    The simulator answers for many clients at once, a Flower client for itself, Flower's server for
    the updates that arrived. Each overrides what it can do.
    """

    ids: Sequence[ClientId]

    def examples(self) -> Iterable[tuple[Any, Any]]:
        """Yield each client's inputs and labels."""
        raise self._cannot("examples")

    def sizes(self) -> NDArray[np.int64]:
        """Return each client's number of examples."""
        raise self._cannot("sizes")

    def insights(self) -> Sequence[ArrayLike]:
        """Return the user's own vector for each client."""
        raise self._cannot("insights")

    def sketches(self, options: Options) -> Sequence[NDArray[Any]]:
        """Return each client's distribution sketch, as private as the client wants it."""
        raise self._cannot("sketches")

    def losses(self, power: int = 1) -> NDArray[np.float64]:
        """Return each client's mean of loss^power over all its examples, under the model."""
        raise self._cannot("losses")

    def features(self) -> NDArray[Any]:
        """Return the mean output of the first dense layer over each client's examples."""
        raise self._cannot("features")

    def gradients(self) -> Vectors:
        """Return the full-batch gradient of each client under the model."""
        raise self._cannot("gradients")

    def gradient_spreads(self) -> NDArray[np.float64]:
        """Return the root mean square distance of each client's batch gradients to their mean."""
        raise self._cannot("gradient_spreads")

    def trained(self, fresh: bool = True) -> Vectors:
        """Return models after local training now, or (fresh=False) after each client's last."""
        raise self._cannot("trained")

    def steps(self, fresh: bool = True) -> Vectors:
        """Return `trained` minus the model."""
        raise self._cannot("steps")

    def updates(self) -> Vectors:
        """Return the updates that arrived this round (reply signals only)."""
        raise self._cannot("updates")

    def durations(self) -> NDArray[np.float64]:
        """Return the seconds that each client took this round (reply signals only)."""
        raise self._cannot("durations")

    def expected_durations(self) -> NDArray[np.float64]:
        """Return the seconds that each client expects a round to take."""
        raise self._cannot("expected_durations")

    def last_array(self) -> int:
        """Return how many numbers the model's last array has, usually the output's biases."""
        raise self._cannot("last_array")

    def classes(self) -> int:
        """Return the number of labels in the federation."""
        raise self._cannot("classes")

    def noise_source(self, client: ClientId) -> np.random.Generator | None:
        """Return the generator of a client's privacy noise; None is the operating system's."""
        return None

    def _cannot(self, what: str) -> ConfigError:
        return ConfigError(
            f"{type(self).__name__} cannot give {what}; choose a signal that needs none"
        )


Compute = Callable[[Clients, Options], Sequence[ArrayLike] | NDArray[Any]]


@dataclass(frozen=True)
class Signal:
    """One kind of reading: when it is collected, what it costs and tells, and how it is made."""

    name: str
    # Once per client, before the selection or with the update, unless a policy's `Needs` says else.
    when: When
    # What it costs: nothing, as it is computed from updates that arrive anyway; one pass over the
    # client's data; a pass through a model; or training one.
    work: Work
    form: Callable[[Options], Form]
    compute: Compute
    # The model that it takes, which a client downloads first. Profiles are taken under the initial
    # one, so that a newcomer's is comparable.
    model: Which
    # What it tells beyond an update: nothing, the number of records, a sketch that can be private,
    # or more, which a client that keeps a privacy budget does not release.
    reveals: Reveals
    remedy: str  # what a Flower user can do where clients do not answer
    simulated: Mapping[str, str]  # options of simulations alone, and what a Flower user can do

    def needs_model(self, options: Options) -> bool:
        """Whether the client must hold a model to answer a question with these options."""
        computes = self.work != "server" and self.model != "none"
        return computes or options.get("embed") == "model"

    def tells_of_records(self, options: Options) -> bool:
        """Whether a reading tells more of the records than their number, without noise."""
        return self.reveals in ("sketch", "records") and not options.get("epsilon")

    def readings(self, clients: Clients, options: Options) -> dict[ClientId, Any]:
        """Return the readings by client."""
        return dict(zip(clients.ids, self.compute(clients, options), strict=True))


SIGNALS: dict[str, Signal] = {}

_DATA = "attach(app, data=...) on the clients"
_MODEL = "attach(app, data=..., model=...) on the clients, after @app.train()"
_REMEDIES = {"server": "another policy", "data": _DATA, "forward": _MODEL, "train": _MODEL}


def register_signal(
    name: str,
    *,
    when: When,
    work: Work,
    form: Form | Callable[[Options], Form],
    model: Which | None = None,
    reveals: Reveals | None = None,
    remedy: str = "",
    simulated: Mapping[str, str] | None = None,
) -> Callable[[Compute], Compute]:
    """Decorate a function that computes a signal, and enter it into `SIGNALS`; see `Signal`.

    What clients compute reveals "records" unless stated otherwise. In a Flower federation, register
    it in a module that the server and the clients import.

    Examples
    --------
    >>> @register_signal("label_count", when="profile", work="data", form=Numbers(low=0))
    ... def label_count(clients, options):
    ...     return [len(np.unique(y)) for _, y in clients.examples()]
    >>> SIGNALS.pop("label_count").reveals
    'records'
    """
    usual: Which = "initial" if when == "profile" else "current"

    def enter(compute: Compute) -> Compute:
        SIGNALS[name] = Signal(
            name,
            when,
            work,
            form if callable(form) else lambda options: form,
            compute,
            model or ("none" if work == "data" else usual),
            reveals or ("nothing" if work == "server" else "records"),
            remedy or _REMEDIES[work],
            simulated or {},
        )
        return compute

    return enter


@dataclass(frozen=True)
class Needs:
    """The signals of a policy, by when they are collected; see `Signal`."""

    profile: frozenset[str] = frozenset()
    query: frozenset[str] = frozenset()
    reply: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in self.profile | self.query | self.reply:
            lookup("signal", name, SIGNALS)


AMOUNT = Numbers(low=0)
COUNT = Numbers(dtype="i8", low=0, high=MAX_COUNT)
COUNTS = Numbers((None,), low=-MAX_COUNT, high=MAX_COUNT)


def _projected_form(options: Options) -> Form:
    return Numbers((int(options.get("k", 0)) or None,), "f4")


def _sketch_form(options: Options) -> Form:
    rows, bits = options.get("rows"), options.get("bits")
    if bits is not None and not 0 < int(bits) <= MAX_BITS:
        raise ConfigError(f"race_sketch: bits={int(bits)} must be from 1 to {MAX_BITS}")
    buckets = None if bits is None else 1 << int(bits)
    return Sketch(None if rows is None else int(rows), buckets)


_INSIGHT = "attach(app, data=..., insight=...) on the clients"
_LOSS = f"{_MODEL}; without torch, attach(loss=...)"
_BOTH = "attach(app, data=..., model=...) on the clients"
_EMBED = {"embed": "let attach(app, data=...) return embedded inputs on the clients"}

# How many examples the client trains on.
register_signal("num_examples", when="profile", work="data", form=COUNT, reveals="size")(
    lambda clients, options: clients.sizes()
)
# The distribution sketch, private if the client or the policy wants it.
register_signal(
    "race_sketch", when="profile", work="data", form=_sketch_form, reveals="sketch",
    simulated=_EMBED,
)(lambda clients, options: clients.sketches(options))  # fmt: skip
# A vector of the user's own that describes the client's data.
register_signal("insight", when="profile", work="data", form=Numbers((None,)), remedy=_INSIGHT)(
    lambda clients, options: clients.insights()
)
# Mean output of the first dense layer under the initial model.
register_signal("feature_profile", when="profile", work="forward", form=Numbers((None,), "f4"))(
    lambda clients, options: clients.features()
)
# Mean loss of the current model over all local data, and the root of the mean squared loss.
register_signal("loss", when="query", work="forward", form=Numbers(), remedy=_LOSS)(
    lambda clients, options: clients.losses()
)
register_signal("loss_rms", when="reply", work="forward", form=Numbers(), remedy=_LOSS)(
    lambda clients, options: np.sqrt(clients.losses(power=2))
)
# Projections of the full-batch gradient and of the update; the spread of the batches' gradients.
register_signal("gradient_sketch", when="query", work="train", form=_projected_form)(
    lambda clients, options: clients.gradients().sketched(options)
)
register_signal("update_sketch", when="reply", work="server", form=_projected_form)(
    lambda clients, options: clients.updates().sketched(options)
)
register_signal("gradient_spread", when="reply", work="train", form=AMOUNT)(
    lambda clients, options: clients.gradient_spreads()
)
# Seconds from sending the model to receiving the update, and what the client expects of a round.
register_signal("duration", when="reply", work="server", form=AMOUNT, model="none")(
    lambda clients, options: clients.durations()
)
register_signal(
    "expected_duration", when="profile", work="data", form=AMOUNT, reveals="size", remedy=_BOTH
)(lambda clients, options: clients.expected_durations())


@register_signal("label_histogram", when="profile", work="data", form=COUNTS)
def _label_histogram(clients: Clients, options: Options) -> list[NDArray[np.int64]]:
    """How many examples of each label the client has; sensitive, so consider epsilon.

    With ``epsilon``, discrete Laplace noise of scale 1 / epsilon is added to each count:
    epsilon-differential privacy for one record that is added or removed. The number of labels is
    public.
    """
    classes = clients.classes()
    epsilon = typed(HistogramEpsilon, options.get("epsilon", 0.0), "label_histogram: epsilon")
    histograms = []
    for client, (_, labels) in zip(clients.ids, clients.examples(), strict=True):
        labels = np.asarray(labels).reshape(-1).astype(np.int64)
        if epsilon:  # an error would tell the server that a label is odd
            labels = np.clip(labels, 0, classes - 1)
        counts = np.bincount(labels, minlength=classes)
        if len(counts) > classes:
            raise ConfigError(f"label_histogram: {client!r} has more than {classes} labels")
        if epsilon:
            source = words(clients.noise_source(client))
            scale = Fraction(*laplace_scale(1, epsilon))  # rounded up, so never less noise
            counts = counts + discrete_laplace(source, classes, *scale.as_integer_ratio())
        histograms.append(counts)
    return histograms


@register_signal("model_sketch", when="query", work="train", form=_projected_form)
def _model_sketch(clients: Clients, options: Options) -> NDArray[Any]:
    """Projection of the locally trained model, or of its step away from the global one."""
    of = dict(options)
    fresh = bool(of.pop("fresh", True))
    models = clients.steps(fresh) if of.pop("step", False) else clients.trained(fresh)
    return models.sketched(of)


def update_distance(updates: ArrayLike) -> NDArray[np.float64]:
    """Distance of each update from their mean (paper 1, equation 14)."""
    exact = np.asarray(updates, np.float64)
    return np.asarray(np.linalg.norm(exact - exact.mean(axis=0), axis=1))


@register_signal("bias_update", when="reply", work="server", form=Numbers((None,), "f4"))
def _bias_update(clients: Clients, options: Options) -> NDArray[Any]:
    """Update of the model's last array, the biases of the output layer."""
    return clients.updates().numpy()[:, -clients.last_array() :]


@register_signal(
    "update_distance", when="reply", work="server", form=AMOUNT,
    simulated={"insight_step": "use reward='gradient-sketch'"},
)  # fmt: skip
def _update_distance(clients: Clients, options: Options) -> NDArray[np.float64]:
    """Distance of the update from the cohort's mean update (paper 1, equation 14).

    With ``insight_step``, of the full gradient, which the client sends beside its update.
    """
    vectors = clients.gradients() if options.get("insight_step") else clients.updates()
    return update_distance(vectors.numpy())
