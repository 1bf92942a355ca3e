"""The contract of a policy, as checks that anybody's policy can be put through.

>>> from fedcohort.policies import Uniform
>>> check_policy(Uniform)
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedcohort import storage
from fedcohort.policies.base import Policy
from fedcohort.rounds import ClientId, Round, Selection, stream
from fedcohort.session import Readings, Session
from fedcohort.signals.catalog import SIGNALS, Options
from fedcohort.signals.table import Signals

Factory = Callable[[], Policy]
Spoil = Callable[[ClientId, Any], Any]
STRANGE_IDS = (" ", "7", "07", "a/b", "naïve ☃", "__array__", "x" * 300, "line\nbreak", "-1")


def check_policy(factory: Factory) -> None:
    """Put a policy through every check; an AssertionError says which promise it breaks.

    The factory, such as a class, returns a fresh policy, fit for cohorts of up to 5 clients.
    """
    log = logging.getLogger("fedcohort")
    before, log.disabled = log.disabled, True  # it would warn of what the checks do on purpose
    try:
        for check in CHECKS:
            check(factory)
    finally:
        log.disabled = before


def reading(name: str, client: ClientId, round_number: int, options: Options | None = None) -> Any:
    """Make up a plausible reading of any signal in its declared form, by its arguments alone."""
    example = SIGNALS[name].form(options or {}).example
    value = example(stream(0, "reading", name, client))
    if value.shape == () and value.dtype.kind == "f":  # losses and the like change over rounds
        value = value * (1 + 0.1 * stream(0, client, round_number).random())
    return value


def recorded(**readings: Readings) -> Signals:
    """Return a memory of readings by signal and client, all of the first round."""
    signals = Signals()
    for name, values in readings.items():
        signals.record(name, values, 0)
    return signals


def select(
    policy: Policy, available: Iterable[ClientId], size: int, **readings: Readings
) -> Selection:
    """Return the first cohort that a policy picks, given readings by signal and client."""
    return policy.select(Round(0, tuple(available), size), recorded(**readings), stream(0))


def drive(
    session: Session,
    available: Sequence[ClientId],
    *,
    drop: Callable[[ClientId], bool] = lambda client: False,
    spoil: Spoil = lambda client, value: value,
) -> Selection:
    """Move a session through one round with made-up readings."""
    number = session.round_number

    def answer(name: str, clients: Sequence[ClientId]) -> Readings:
        options = session.policy.signal_options.get(name, {})
        return {c: spoil(c, reading(name, c, number, options)) for c in clients}

    selection = session.begin(available, answer)
    finished = [c for c in selection.clients if not drop(c)]
    session.finish({n: answer(n, finished) for n in session.policy.needs.reply}, finished)
    _assert_sound(session.policy, selection, available, session.cohort_size)
    return selection


def _assert_sound(
    policy: Policy, selection: Selection, available: Sequence[ClientId], cohort_size: int
) -> None:
    """Check what the session cannot: it has refused repeats, strangers and cohorts too large."""
    name, clients = repr(policy), selection.clients
    wanted = min(cohort_size, len(set(available)))
    assert len(clients) == wanted, f"{name} picked {len(clients)} clients, not {wanted}"
    assert all(type(c) is str for c in clients), f"{name} returned ids that are not str"
    if selection.weights is not None:
        weights = np.array(selection.weights)
        assert np.isfinite(weights).all(), f"{name} returned a weight that is not finite"
        assert (weights >= 0).all() and weights.any(), f"{name} returned weights {weights}"
    scores = selection.scores or {}
    assert np.isfinite(list(scores.values())).all(), f"{name} gave the scores {scores}"


def _spoiled(every: int, instead: Sequence[Any]) -> Spoil:
    """Spoil the readings of clients 0, `every`, ..., each by its own value or function."""

    def spoil(client: ClientId, value: Any) -> Any:
        place, others = divmod(int(client[-3:]), every)
        bad = instead[place % len(instead)]
        return value if others else bad(value) if callable(bad) else bad

    return spoil


def _names(count: int, first: int = 0) -> list[ClientId]:
    return [f"client-{i:03d}" for i in range(first, first + count)]


def _session(factory: Factory, cohort_size: int = 5) -> Session:
    return Session(factory(), cohort_size=cohort_size, seed=0, model_bytes=1000)


def _run(session: Session, available: Sequence[ClientId], rounds: int, **how: Any) -> list[Any]:
    return [drive(session, available, **how).clients for _ in range(rounds)]


def check_cohort_size(factory: Factory) -> None:
    """The cohort has the wanted size, or holds all who are available, whatever their ids."""
    for count in (20, 5, 4, 1):
        _run(_session(factory), _names(count), rounds=4)
    _run(_session(factory, cohort_size=1), _names(1), rounds=4)
    _run(_session(factory, cohort_size=4), STRANGE_IDS, rounds=4)


def check_deterministic(factory: Factory) -> None:
    """The same seed gives the same cohorts, whatever the order in which clients are listed."""
    forward = _run(_session(factory), _names(20), rounds=6)
    backward = _run(_session(factory), _names(20)[::-1], rounds=6)
    assert forward == backward, f"{factory()!r} is not a function of its seed"


def check_join_and_leave(factory: Factory) -> None:
    """Clients come and go without harm."""
    session = _session(factory)
    for present in (_names(12), _names(12, 6), _names(3), _names(30), _names(6, 24)):
        _run(session, present, rounds=2)


def check_silent_clients(factory: Factory) -> None:
    """Some or all clients never answer; the cohort is full all the same."""
    for every in (1, 3):
        _run(_session(factory), _names(15), rounds=4, spoil=_spoiled(every, [None]))


def check_dropouts(factory: Factory) -> None:
    """Selected clients fail to finish, some or all of them."""
    _run(_session(factory), _names(15), rounds=5, drop=lambda c: int(c[-1]) % 2 == 0)
    _run(_session(factory), _names(15), rounds=5, drop=lambda c: True)


def check_bad_readings(factory: Factory) -> None:
    """Readings that are NaN, infinite, misshapen or not numbers are dropped, never fatal."""
    bad = [float("nan"), float("inf"), np.ones((2, 3, 4)), "text", [[1.0], [1.0, 2.0]], None]
    session = _session(factory)
    _run(session, _names(24), rounds=5, spoil=_spoiled(3, bad))
    needs = session.policy.needs
    if needs.profile | needs.query:
        assert session.signals.dropped, f"{session.policy!r}: bad readings were not counted"


def hostile(value: Any, which: int) -> Any:
    """Return a finite but hostile reading in place of `value`: huge, tiny or contradictory."""
    value = np.asarray(value)
    if value.dtype.names is not None:
        fields = (("n", 5e-324), ("noise", 1e308), ("n", 1e300), ("noise", 2.0**40), ("n", 2.0**40))
        field, number = fields[which % len(fields)]
        out = value.copy()
        out[field] = number
        return out
    numbers = (1.7e308, -1.7e308, 5e-324, 1e15, -1e15, 2.0**40, 1e200, 0.0)
    return np.full(value.shape, numbers[which % len(numbers)])


def check_hostile_readings(factory: Factory) -> None:
    """Readings that are finite but absurd neither raise nor spoil the cohort."""
    lies = [partial(hostile, which=which) for which in range(24)]
    for every in (1, 3):
        _run(_session(factory), _names(24), rounds=6, spoil=_spoiled(every, lies))
    for lie in lies[:8]:  # a client that is alone at first does not decide what readings are
        session = _session(factory)
        _run(session, _names(1), 1, spoil=_spoiled(1, [lie]))
        _run(session, _names(12), rounds=2)


def check_save_and_restore(factory: Factory) -> None:
    """A session restored from a file continues bit for bit, wherever it was saved."""
    for cohort_size, rounds in ((5, 8), (3, 9)):
        whole = _session(factory, cohort_size)
        expected = _run(whole, _names(20), rounds)
        for place in (1, 4, rounds - 2):
            first = _session(factory, cohort_size)
            start = _run(first, _names(20), place)
            second = _session(factory, cohort_size)
            with tempfile.TemporaryDirectory() as folder:
                storage.save(f"{folder}/session", first.state_dict())
                second.load_state_dict(storage.load(f"{folder}/session"))
            resumed = start + _run(second, _names(20), rounds - place)
            assert resumed == expected, (
                f"{whole.policy!r} does not continue where it was saved, after round {place} "
                f"with cohorts of {cohort_size}: it remembers something outside of `state`"
            )
            same = second.ledger.state_dict() == whole.ledger.state_dict()
            assert same, "the ledger was not restored"


CHECKS: tuple[Callable[[Factory], None], ...] = tuple(
    check
    for name, check in vars().items()
    if name.startswith("check_") and check is not check_policy
)
