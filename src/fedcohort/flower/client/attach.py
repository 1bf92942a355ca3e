"""`attach`: what a Flower client needs to answer a `CohortStrategy`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from numpy.typing import ArrayLike

from fedcohort.exceptions import ConfigError
from fedcohort.flower.client.answer import DEFAULT_LOSS, Answers, Handler, own_id
from fedcohort.flower.client.data import Keys, data_function, from_settings
from fedcohort.flower.client.privacy import Privacy, check_covered, hide_size
from fedcohort.flower.client.train import Training
from fedcohort.flower.wire import LOG, PROBE, QUERY, RAISED, UPLOAD, error_line
from fedcohort.registry import lookup
from fedcohort.rounds import ClientId
from fedcohort.signals.catalog import SIGNALS

if TYPE_CHECKING:
    import torch

    from fedcohort.simulate.local import LocalTraining


def attach(
    app: ClientApp,
    data: Any,
    model: Callable[..., torch.nn.Module] | None = None,
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
        Returns an ``nn.Module`` of the architecture that is trained; its arguments may be named as
        in the run config. With it, signals are measured by our own code, and clients without
        ``@app.train()`` train by it. Without it, losses and updates come from the app's handlers,
        and feature profiles are not available.
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
        Number of labels, for label counts and sketches; by default the outputs of the model.
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
    if app._call is not None:
        raise ConfigError(
            "attach: this app was made with client_fn, whose messages carry no queries; turn its "
            "client into functions under @app.train() and @app.evaluate(), as Flower's message "
            "API has them, then attach"
        )
    handlers = app._registered_funcs
    for name in (QUERY, PROBE, UPLOAD):
        if name in handlers:
            raise ConfigError(f"attach: the app has a handler for {name!r}: attach once")
    for name in signals or ():
        lookup("signal", name, SIGNALS)
        check_covered(name, privacy)
    own_train = handlers.get("train.default")
    if train is not None and own_train is not None:
        raise ConfigError("attach: the app has @app.train() already; leave out train=")
    if train is not None:
        own_train = through(app._mods, train)
    own_evaluate = handlers.get("evaluate.default")
    answers = Answers(
        data_function(data, keys),
        None if model is None else partial(from_settings, model),
        local,
        identity,
        None if signals is None else frozenset(signals),
        privacy,
        insight,
        classes,
        loss,
        device,
        cache,
        None if own_train is None else through(mods, own_train),
        own_evaluate,
        _claims_privacy([*app._mods, *mods]),
    )
    around = [mod for mod in app._mods if not _is_private(mod)]  # which fail without a model
    handlers[QUERY] = replying_with_errors(through(around, answers.reply))
    if own_evaluate is not None:

        def evaluate(message: Message, context: Context) -> Message:
            reply = own_evaluate(message, context)
            return hide_size(reply) if answers.hides_size(context) else reply

        handlers["evaluate.default"] = evaluate
    if model is not None or own_train is not None:
        training = Training(answers)
        if own_train is None:
            training.handler = through([*app._mods, *mods], training.train_by_our_code)
        handlers["train.default"] = replying_with_errors(training.train)
        handlers[PROBE] = replying_with_errors(training.probe)
        handlers[UPLOAD] = replying_with_errors(through(around, training.upload))


def through(mods: Sequence[Any], handler: Handler) -> Handler:
    """Return a handler with mods around it, the first one outermost, as Flower calls them."""
    for mod in reversed(mods):
        handler = partial(_call_mod, mod, handler)
    return handler


def _call_mod(mod: Any, call_next: Handler, message: Message, context: Context) -> Message:
    reply: Message = mod(message, context, call_next)
    return reply


def replying_with_errors(handler: Handler) -> Handler:
    """Return a handler that replies with an error where it raises.

    Flower would do so too, but its simulation buries the message in a traceback of Ray.
    """

    def safe(message: Message, context: Context) -> Message:
        try:
            return handler(message, context)
        except Exception as error:
            LOG.exception("%s", message.metadata.message_type)
            return Message(Error(RAISED[1], error_line(error)), reply_to=message)

    return safe


def _is_private(mod: Any) -> bool:
    """Whether a mod is one of Flower's for differential privacy."""
    module = str(getattr(mod, "__module__", type(mod).__module__))
    return module.startswith("flwr.") and "dp_mod" in module


def _claims_privacy(mods: Sequence[Any]) -> str:
    """Return what makes this app's training private, "" if nothing does."""
    if "opacus" in sys.modules:
        return "Opacus"
    private = [mod for mod in mods if _is_private(mod)]
    return str(getattr(private[0], "__name__", type(private[0]).__name__)) if private else ""
