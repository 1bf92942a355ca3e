"""`attach`: what a Flower client needs to answer a `CohortStrategy`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from numpy.typing import ArrayLike

from fedcohort.exceptions import ConfigError
from fedcohort.flower.answers import DEFAULT_LOSS, Answers, Handler
from fedcohort.flower.data import Keys, as_function
from fedcohort.flower.identity import answer, own_id
from fedcohort.flower.messages import PROBE, QUERY, UPLOAD
from fedcohort.flower.privacy import Privacy, check_covered, hide_size, is_covered
from fedcohort.flower.training import Training, through, with_errors
from fedcohort.rounds import ClientId
from fedcohort.signals.catalog import SIGNALS

if TYPE_CHECKING:
    import torch

    from fedcohort.simulate.local import LocalTraining


def attach(
    app: ClientApp,
    data: Any,
    model: Callable[[], torch.nn.Module] | None = None,
    *,
    keys: Keys | None = None,
    train: Handler | None = None,
    mods: Sequence[Any] = (),
    local: LocalTraining | None = None,
    identity: Callable[[Context], ClientId] = own_id,
    signals: Collection[str] | None = None,
    privacy: Privacy | None = None,
    insight: Callable[[Any, Any], ArrayLike] | None = None,
    classes: int = 0,
    loss: str | Callable[..., Any] = DEFAULT_LOSS,
    device: str = "cpu",
    cache: bool = True,
) -> None:
    """Add to an app what a client must answer: signals, and the two phases of a gate.

    Call it at the end of the module. An app that has ``@app.train()`` and ``@app.evaluate()`` keeps
    them: they train and evaluate as before.

    Parameters
    ----------
    app : ClientApp
    data : object
        This client's training data: ``(x, y)`` arrays, a torch ``DataLoader`` or ``Dataset``, a
        Hugging Face ``Dataset``, a pandas ``DataFrame``; or a function that returns one of them,
        or a tuple that starts with it. The function takes the context, or ``(partition_id,
        num_partitions)`` and further arguments that are named as in the run config.
    model : callable, optional
        Returns an ``nn.Module`` of the architecture that is trained. With it, signals are measured
        by our own code, and clients without ``@app.train()`` train by it. Without it, losses and
        updates come from the app's handlers, and feature profiles are not available.
    keys : (str, str), optional
        Names of the inputs and labels in batches that are dicts; the usual ones are found.
    train : callable, optional
        A training handler ``(message, context) -> message`` that is not registered with the app.
    mods : sequence, optional
        Flower mods around the training, such as a clipping mod.
    local : LocalTraining, optional
        How our training goes.
    identity : callable, optional
        ``identity(context)`` returns this client's stable id; by default from the node config.
    signals : collection of str, optional
        The signals that this client answers; by default all that it can. The operator of a node
        can restrict them further with ``fedcohort-signals`` in the node config.
    privacy : Privacy, optional
        Noise and budget of this client's sketches. The server has no say in it. What tells more
        about the records (losses, profiles, label counts, insights) is then not released.
    insight : callable, optional
        ``insight(x, y)`` returns a vector, for the signal of that name.
    classes : int, optional
        Number of labels, for sketches that hash them; by default the outputs of the model.
    loss : str or callable, optional
        With `model`: as in `fedcohort.simulate`. Without: ``loss(arrays, x, y)`` returns the mean
        loss or one loss per example; or the name of the metric that the app's handlers report, by
        default ``train_loss``, ``eval_loss`` or the only one with "loss" in its name.
    device : str
        As in `fedcohort.simulate`.
    cache : bool, default=True
        Keep the model of the round in memory, so that it is not sent a second time.

    Examples
    --------
    >>> import numpy as np
    >>> app = ClientApp()
    >>> attach(app, data=(np.eye(4), np.arange(4)))
    """
    handlers = _handlers(app)
    own = handlers.get("train.default")
    if train is not None and own is not None:
        raise ConfigError("attach: the app has @app.train() already; leave out train=")
    if train is not None:
        own = through(app._mods, train)
    answers = Answers(
        as_function(data, keys),
        model,
        local,
        identity,
        privacy,
        insight,
        classes,
        loss,
        device,
        cache,
        None if own is None else through(mods, own),
        handlers.get("evaluate.default"),
    )
    wanted = _wanted(answers, signals)
    around = [mod for mod in app._mods if not _is_clipping(mod)]

    def register(name: str, handler: Handler) -> None:
        if name in handlers:
            raise ConfigError(f"attach: the app has a handler for {name!r} already")
        handlers[name] = with_errors(through(around, handler))

    if answers.evaluate is not None:
        handlers["evaluate.default"] = partial(_evaluate, answers=answers)
    register(f"{QUERY}identity", partial(_identity, identity=identity))
    for name in wanted:
        register(f"{QUERY}{name}", partial(_query, name=name, answers=answers))
    if model is not None or own is not None:
        training = Training(answers, [*app._mods, *mods], frozenset(wanted))
        handlers["train.default"] = with_errors(training.train)
        handlers[PROBE] = with_errors(training.probe)
        register(UPLOAD, training.upload)


def _handlers(app: ClientApp) -> dict[str, Handler]:
    """Return the app's handlers by message type; ConfigError for an app of the old kind."""
    if app._call is not None:
        raise ConfigError(
            "attach: this app was made with client_fn, whose messages carry no queries; turn its "
            "client into functions under @app.train() and @app.evaluate(), as Flower's message "
            "API has them, then attach"
        )
    return app._registered_funcs


def _wanted(answers: Answers, signals: Collection[str] | None) -> list[str]:
    """Return the signals that this client answers; ConfigError for one that it cannot."""
    can = [name for name, signal in SIGNALS.items() if answers.can_answer(signal)]
    covered = [name for name in can if is_covered(name, answers.privacy)]
    wanted = covered if signals is None else list(signals)
    for name in wanted:
        check_covered(name, answers.privacy)
        if name not in can:
            raise ConfigError(
                f"attach: this client cannot answer {name!r}; it can answer {', '.join(can)} "
                "(profiles need model=, losses model= or the app's own handlers, an insight "
                "needs insight=)"
            )
    return wanted


def _is_clipping(mod: Any) -> bool:
    """Whether a mod is one of Flower's for differential privacy, which fail without a model."""
    module = str(getattr(mod, "__module__", type(mod).__module__))
    return module.startswith("flwr.") and "dp_mod" in module


def _identity(
    message: Message, context: Context, identity: Callable[[Context], ClientId]
) -> Message:
    return answer(message, context, identity)


def _evaluate(message: Message, context: Context, answers: Answers) -> Message:
    """Evaluate by the app's own handler."""
    assert answers.evaluate is not None  # or it would not be registered
    reply = answers.evaluate(message, context)
    return hide_size(reply) if answers.hides_size(context) else reply


def _query(message: Message, context: Context, name: str, answers: Answers) -> Message:
    return answers.reply(name, message, context)
