"""`attach`: what a Flower client needs to answer a `CohortStrategy`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from numpy.typing import ArrayLike

from fedcohort.exceptions import ConfigError
from fedcohort.flower.answers import Answers, Privacy
from fedcohort.flower.identity import answer, own_id
from fedcohort.flower.training import Handler, Training
from fedcohort.rounds import ClientId
from fedcohort.signals.catalog import SIGNALS

if TYPE_CHECKING:
    import torch

    from fedcohort.simulate.local import LocalTraining


def attach(
    app: ClientApp,
    data: Callable[[Context], tuple[Any, Any]] | tuple[Any, Any],
    model: Callable[[], torch.nn.Module] | None = None,
    *,
    train: Handler | None = None,
    mods: Sequence[Any] = (),
    local: LocalTraining | None = None,
    identity: Callable[[Context], ClientId] = own_id,
    signals: Collection[str] | None = None,
    privacy: Privacy | None = None,
    insight: Callable[[Any, Any], ArrayLike] | None = None,
    classes: int = 0,
    loss: str | Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = "cross-entropy",
    device: str = "cpu",
    cache: bool = True,
) -> None:
    """Register the handlers of a client: signals, training, and the two phases of a gate.

    Parameters
    ----------
    app : ClientApp
    data : callable or pair
        ``data(context)`` returns this client's examples and labels, (x, y); or the pair itself.
    model : callable, optional
        Returns an ``nn.Module`` of the architecture that is trained. Without it, and without
        `train`, only signals that need no model are answered, and training is left to your own
        ``@app.train()``.
    train : callable, optional
        Your own training, a Flower handler ``(message, context) -> message``, in place of ours. Do
        not register it with ``@app.train()``: `attach` does, around it.
    mods : sequence, optional
        Flower mods around the training, such as a clipping mod.
    local : LocalTraining, optional
        How our training goes.
    identity : callable, optional
        ``identity(context)`` returns this client's stable id; by default from the node config.
    signals : collection of str, optional
        The signals that this client answers; by default all that it can. Only ``race_sketch`` is
        ever made private.
    privacy : Privacy, optional
        Noise and budget of this client's sketches. The server has no say in it.
    insight : callable, optional
        ``insight(x, y)`` returns a vector, for the signal of that name.
    classes : int, optional
        Number of labels, for sketches that hash them.
    loss, device
        As in `fedcohort.simulate`.
    cache : bool, default=True
        Keep the model of the round in memory, so that it is not sent a second time.

    Examples
    --------
    >>> import numpy as np
    >>> app = ClientApp()
    >>> attach(app, data=(np.eye(4), np.arange(4)))
    """
    can = [n for n, s in SIGNALS.items() if s.work == "data" or (s.needs_model and model)]
    can = [n for n in can if n != "insight" or insight is not None]
    wanted = can if signals is None else list(signals)
    for name in wanted:
        if name not in can:
            raise ConfigError(
                f"attach: this client cannot answer {name!r}; it can answer {', '.join(can)} "
                "(loss, profiles and sketches of models need model=, an insight needs insight=)"
            )
    answers = Answers(
        data, model, local, identity, privacy, insight, classes, loss, device, cache, train
    )
    app.query("identity")(partial(_identity, identity=identity))
    for name in wanted:
        app.query(name)(partial(_query, name=name, answers=answers))
    if model is not None or train is not None:
        _register_training(app, Training(answers, train, mods, frozenset(wanted)))


def _register_training(app: ClientApp, training: Training) -> None:
    try:
        app.train()(training.train)
    except ValueError as error:
        raise ConfigError(
            "attach: the app has a train function already: leave out @app.train() and pass the "
            "function as attach(train=...)"
        ) from error
    app.train("probe")(training.probe)
    app.train("upload")(training.upload)


def _identity(
    message: Message, context: Context, identity: Callable[[Context], ClientId]
) -> Message:
    return answer(message, context, identity)


def _query(message: Message, context: Context, name: str, answers: Answers) -> Message:
    return answers.reply(name, message, context)
