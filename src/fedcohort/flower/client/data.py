"""What `attach(data=...)` accepts: arrays, loaders, data sets, frames, and functions of them.

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
        self.may_be_tokens = False  # known after a pass: rows of integers wider than a byte
        self._arrays: Batch | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches; only one of them is in memory at a time."""
        if self._arrays is not None:
            yield self._arrays
            return
        for x, y in _batches(self.data, self.keys):
            whole = x.dtype.kind in "iu" and x.ndim == 2 and x.itemsize > 1
            self.may_be_tokens = self.may_be_tokens or whole
            yield (x.astype(np.float32) if x.dtype.kind in "iub" else x), y

    def __len__(self) -> int:
        """Return the number of examples, counted in a pass over them if need be."""
        if self._arrays is not None:
            return len(self._arrays[0])
        known = getattr(self.data, "dataset", self.data)
        if not isinstance(self.data, tuple) and _is_rows(known):
            return len(known)
        return sum(len(x) for x, _ in self)

    def arrays(self) -> Batch:
        """Return all inputs and labels."""
        if self._arrays is None:
            parts = list(self)
            if not parts:
                raise ConfigError("attach(data=...): there are no examples")
            inputs, labels = zip(*parts, strict=True)
            self._arrays = _joined(inputs), np.concatenate(labels)
        return self._arrays


Data = Callable[[Context], Examples]


def data_function(data: Any, keys: Keys | None = None) -> Data:
    """Return a function of the context, whatever `attach` was given."""
    if not callable(data) or _is_rows(data):
        examples = Examples(data, keys)
        return lambda context: examples
    arguments = _argument_names(data)
    return lambda context: Examples(data(*_arguments(arguments, context)), keys)


def from_settings(function: Callable[..., Any], context: Context) -> Any:
    """Call a function with the arguments that the node config or the run config has.

    Examples
    --------
    >>> from flwr.app import RecordDict
    >>> context = Context(0, 1, {}, RecordDict(), {"num-classes": 10})
    >>> from_settings(lambda num_classes, hidden=4: (num_classes, hidden), context)
    (10, 4)
    """
    names = [name for name, _ in _argument_names(function)]
    settings = {name: context if name == "context" else _setting(name, context) for name in names}
    return function(**{name: value for name, value in settings.items() if value is not None})


def _argument_names(function: Callable[..., Any]) -> list[tuple[str, bool]]:
    """Return the names of a function's arguments, and whether each must be given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return [("context", True)]
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [(p.name, p.default is p.empty) for p in plain]


def _arguments(names: list[tuple[str, bool]], context: Context) -> list[Any]:
    """Return the arguments of a data function: the context, or the partition and run settings."""
    wanted = [name for name, _ in names]
    if len([1 for _, needed in names if needed]) <= 1 and "partition_id" not in wanted:
        return [context] if names else []
    by_position = "partition_id" not in wanted
    positions = ("partition_id", "num_partitions", "batch_size") if by_position else ()
    values: list[Any] = []
    for i, (name, needed) in enumerate(names):
        if name == "context":
            values.append(context)
            continue
        known = _setting(name, context)
        if known is None and i < len(positions):
            known = _setting(positions[i], context)
        if known is None and needed:
            raise ConfigError(
                f"attach(data=...): the function wants {name!r}, which neither the node config nor "
                "the run config has; pass data=lambda context: ..."
            )
        if known is None:
            break
        values.append(known)
    return values


def _setting(name: str, context: Context) -> Any:
    dashed = name.replace("_", "-")
    return context.node_config.get(dashed, context.run_config.get(dashed))


def _training_part(data: Any) -> Any:
    """Return the training data where test data came with it, as load functions often return."""
    if isinstance(data, Mapping) and "train" in data:
        return data["train"]
    if not isinstance(data, tuple) or not data:
        return data
    if _is_rows(data[0]) or hasattr(data[0], "get_label"):
        return data[0]
    if len(data) == 4:  # x_train, y_train, x_test, y_test
        return data[:2]
    if len(data) == 2 and all(isinstance(part, tuple) and len(part) == 2 for part in data):
        return data[0]  # (x_train, y_train), (x_test, y_test), as Keras loads data
    return data


def _is_rows(data: Any) -> bool:
    """Whether this is a loader, data set or frame rather than an array."""
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        return True
    if hasattr(data, "column_names") or (hasattr(data, "dataset") and hasattr(data, "__iter__")):
        return True
    if isinstance(data, list):
        return bool(data) and isinstance(data[0], Mapping | tuple)
    array = hasattr(data, "__array__") or isinstance(data, tuple | str | Mapping)
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not array


def _batches(data: Any, keys: Keys | None) -> Iterator[Batch]:
    if isinstance(data, tuple) and len(data) == 2:
        yield _as_batch(*data)
    elif hasattr(data, "get_label"):  # an XGBoost DMatrix
        yield _as_batch(data.get_data().toarray(), data.get_label())
    elif hasattr(data, "iloc") and hasattr(data, "columns"):
        yield from _frame(data, keys)
    elif hasattr(data, "dataset") or (_is_rows(data) and not hasattr(data, "__getitem__")):
        for item in data:
            yield _item(item, keys)
    elif hasattr(data, "column_names") or _is_rows(data):
        yield from _rows((data[i] for i in range(len(data))), keys)
    elif isinstance(data, Iterable) and not hasattr(data, "__array__"):
        for item in data:
            yield _item(item, keys)
    else:
        raise ConfigError(
            f"attach(data=...): {type(data).__name__} is not understood; give (x, y) arrays, a "
            "DataLoader, a Dataset, a DataFrame, or a function that returns one of them"
        )


def _rows(items: Iterable[Any], keys: Keys | None) -> Iterator[Batch]:
    """Gather single examples into batches; items that are batches already pass through."""
    pending: list[Batch] = []
    for item in items:
        x, y = _pair(item, keys)
        if np.ndim(y) > 0 and np.ndim(x) > 0 and len(x) == len(y):
            yield _as_batch(x, y)
            continue
        pending.append((_array(x)[None], np.asarray(_array(y)).reshape(1)))
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
        most = max(width[0] for width in widths)
        parts = [np.pad(part, ((0, 0), (0, most - part.shape[1]))) for part in parts]
    return np.concatenate(parts)


def _item(item: Any, keys: Keys | None) -> Batch:
    return _as_batch(*_pair(item, keys))


def _pair(item: Any, keys: Keys | None) -> tuple[Any, Any]:
    """Return inputs and labels of an item: a pair, or a dict whose keys are looked for."""
    if isinstance(item, list | tuple) and len(item) == 2:
        return item[0], item[1]
    if not isinstance(item, Mapping):
        raise ConfigError(
            f"attach(data=...): a batch is a {type(item).__name__}, not a pair or a dict"
        )
    label = keys[1] if keys else _find(item, LABELS, "labels")
    rest = [key for key in item if key != label]
    inputs = keys[0] if keys else rest[0] if len(rest) == 1 else _find(item, INPUTS, "inputs")
    missing = [key for key in (inputs, label) if key not in item]
    if missing:
        raise ConfigError(f"attach(keys=...): a batch has no {missing[0]!r}, only {list(item)}")
    return item[inputs], item[label]


def _find(item: Mapping[str, Any], names: tuple[str, ...], what: str) -> str:
    found = next((name for name in names if name in item), None)
    if found is None:
        raise ConfigError(
            f"attach(data=...): the {what} are not under a usual name; say which of {list(item)} "
            "are the inputs and the labels: attach(keys=(inputs, labels))"
        )
    return found


def _frame(frame: Any, keys: Keys | None) -> Iterator[Batch]:
    """Yield a frame's numeric columns and its label column."""
    columns = list(frame.columns)
    label = keys[1] if keys else _find(dict.fromkeys(columns), LABELS, "labels")
    if label not in columns:
        raise ConfigError(f"attach(keys=...): the frame has no column {label!r}, only {columns}")
    inputs = frame.drop(columns=[label])
    numeric = inputs.select_dtypes(include=["number", "bool"])
    if numeric.shape[1] < inputs.shape[1]:
        words = sorted(set(inputs.columns) - set(numeric.columns))
        raise ConfigError(f"attach(data=...): the columns {words} are not numbers; encode them")
    yield _as_batch(numeric.to_numpy(), frame[label].to_numpy())


def _array(values: Any) -> NDArray[Any]:
    """Return anything array-like as an array; torch's tensors may be on a GPU or need gradients."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    try:
        return np.asarray(values)
    except ValueError:  # rows of several lengths
        rows = np.empty(len(values), object)
        rows[:] = [_array(row) for row in values]
        return rows


def _as_batch(x: Any, y: Any) -> Batch:
    inputs, labels = _array(x), _array(y)
    if inputs.dtype.kind not in "fiub":
        inputs = _joined([_array(one)[None] for one in x]) if len(inputs) else np.empty((0, 1))
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind == "f" and len(labels) and (labels == np.rint(labels)).all():
        labels = labels.astype(np.int64)
    if len(inputs) != len(labels):
        raise ConfigError(f"attach(data=...): {len(inputs)} inputs and {len(labels)} labels")
    return inputs, labels
