"""What `attach(data=...)` accepts: arrays, loaders, data sets, and functions of them.

Everything becomes `Examples`: batches of (x, y) that are read in one pass, or as two arrays. No
framework is imported; its objects are recognized by what they offer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError

Keys = tuple[str, str]
Batch = tuple[NDArray[Any], NDArray[Any]]
INPUTS = ("img", "image", "images", "pixel_values", "input_ids", "x", "features", "data", "input",
          "inputs")  # fmt: skip
LABELS = ("label", "labels", "target", "targets", "y", "class", "fine_label", "coarse_label")
ROWS = 256  # read at once from a data set without batches
OTHER_NAMES = {"num-clients": "num-partitions"}  # of settings, in Flower's examples


class Examples:
    """A client's examples, read in batches or as a whole; `data` and `keys` are those of `attach`.

    Examples
    --------
    >>> rows = [{"img": np.zeros((2, 2)), "label": 1}, {"img": np.ones((2, 2)), "label": 0}]
    >>> x, y = Examples(rows).arrays()
    >>> x.shape, y.tolist()
    ((2, 2, 2), [1, 0])
    """

    def __init__(self, data: Any, keys: Keys | None = None) -> None:
        self.data, self.keys = _training_part(data), keys
        self._arrays: Batch | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches; only one of them is in memory at a time."""
        return _batches(self.data, self.keys) if self._arrays is None else iter([self._arrays])

    def __len__(self) -> int:
        """Count the examples, in a pass over them."""
        return sum(len(x) for x, _ in self)

    def arrays(self) -> Batch:
        if self._arrays is None:
            parts = list(self)
            if not parts:
                raise ConfigError("attach(data=...): there are no examples")
            self._arrays = _gathered(parts)
        return self._arrays


Data = Callable[[Context], Examples]


def data_function(data: Any, keys: Keys | None = None) -> Data:
    """Return a function of the context, whatever `attach` was given."""
    if callable(data):
        return lambda context: Examples(from_settings(data, context), keys)
    examples = Examples(data, keys)
    return lambda context: examples


def from_settings(function: Callable[..., Any], context: Context) -> Any:
    """Call a function with the context, or with arguments that the node or run config has.

    Examples
    --------
    >>> from flwr.app import RecordDict
    >>> context = Context(0, 1, {}, RecordDict(), {"num-classes": 10})
    >>> from_settings(lambda num_classes, hidden=4: (num_classes, hidden), context)
    (10, 4)
    """
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    values = {p.name: context if p.name == "context" else _setting(p.name, context) for p in named}
    missing = [p.name for p in named if p.default is p.empty and values[p.name] is None]
    if len(named) == 1 and missing:
        return function(context)
    if missing:
        raise ConfigError(
            f"attach: the function wants {missing[0]!r}, which neither the node config nor the run "
            "config has; pass lambda context: ..."
        )
    return function(**{name: value for name, value in values.items() if value is not None})


def _setting(name: str, context: Context) -> Any:
    dashed = name.replace("_", "-")
    dashed = OTHER_NAMES.get(dashed, dashed)
    return context.node_config.get(dashed, context.run_config.get(dashed))


def _training_part(data: Any) -> Any:
    """Return the training data where test data came with it, as load functions often return."""
    if isinstance(data, Mapping) and "train" in data:
        return data["train"]
    if not isinstance(data, tuple) or not data:
        return data
    if not hasattr(data[0], "__array__") and not isinstance(data[0], list | tuple):
        return data[0]  # (train loader, test loader)
    return data[:2] if len(data) == 4 else data  # x_train, y_train, x_test, y_test


def _batches(data: Any, keys: Keys | None) -> Iterator[Batch]:
    is_other = isinstance(data, str | Mapping | tuple) or hasattr(data, "__array__")
    by_number = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, tuple) and len(data) == 2:
        yield _as_batch(*data)
    elif hasattr(data, "get_label"):  # an XGBoost DMatrix
        yield _as_batch(data.get_data().toarray(), data.get_label())
    elif not is_other and (by_number or isinstance(data, Iterable)):
        yield from _rows((data[i] for i in range(len(data))) if by_number else data, keys)
    else:
        raise ConfigError(
            f"attach(data=...): {type(data).__name__} is not understood; give (x, y) arrays, a "
            "DataLoader, a Dataset, or a function that returns one of them"
        )


def _rows(items: Iterable[Any], keys: Keys | None) -> Iterator[Batch]:
    """Gather single examples into batches; items that are batches already pass through."""
    pending: list[Batch] = []
    for item in items:
        x, y = _pair(item, keys)
        if np.ndim(y) > 0 and len(x) == len(y):
            yield _as_batch(x, y)
            continue
        pending.append((_array(x)[None], _array(y).reshape(1)))
        if len(pending) == ROWS:
            yield _gathered(pending)
            pending = []
    if pending:
        yield _gathered(pending)


def _gathered(rows: list[Batch]) -> Batch:
    inputs, labels = zip(*rows, strict=True)
    return _as_batch(_joined(inputs), np.concatenate(labels))


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Concatenate rows; tokens of several lengths are padded with 0."""
    widths = {part.shape[1:] for part in parts}
    if len(widths) > 1 and all(len(width) == 1 for width in widths):
        longest = max(width[0] for width in widths)
        parts = [np.pad(part, ((0, 0), (0, longest - part.shape[1]))) for part in parts]
    return np.concatenate(parts)


def _pair(item: Any, keys: Keys | None) -> tuple[Any, Any]:
    """Return inputs and labels of an item: a pair, or a dict whose keys are looked for."""
    if isinstance(item, list | tuple) and len(item) == 2:
        return item[0], item[1]
    if not isinstance(item, Mapping):
        raise ConfigError(
            f"attach(data=...): a batch is a {type(item).__name__}, not a pair or a dict"
        )
    label = keys[1] if keys else _usual_key(item, LABELS)
    rest = [key for key in item if key != label]
    inputs = keys[0] if keys else rest[0] if len(rest) == 1 else _usual_key(item, INPUTS)
    if inputs not in item or label not in item:
        raise ConfigError(
            f"attach(data=...): inputs and labels are not under usual names among {list(item)}; "
            "say which they are: attach(keys=(inputs, labels))"
        )
    return item[inputs], item[label]


def _usual_key(item: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in item), None)


def _array(values: Any) -> NDArray[Any]:
    """Return anything array-like as an array; torch's tensors may be on a GPU or need gradients."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    try:
        return np.asarray(values)
    except ValueError:  # rows of several lengths
        return _joined([_array(row)[None] for row in values])


def _as_batch(x: Any, y: Any) -> Batch:
    inputs, labels = _array(x), _array(y)
    if inputs.dtype.kind not in "fiub":  # a list of tensors
        inputs = _joined([_array(one)[None] for one in x]) if len(inputs) else np.empty((0, 1))
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind == "f" and len(labels) and (labels == np.rint(labels)).all():
        labels = labels.astype(np.int64)
    if len(inputs) != len(labels):
        raise ConfigError(f"attach(data=...): {len(inputs)} inputs and {len(labels)} labels")
    return inputs, labels
