"""Splits of a labeled data set over clients.

Every function in `PARTITIONS` is called `partition(labels, clients, rng, *, min_size=1, ...)` and
returns one ascending array of sample indices per client. All samples are handed out, each once,
except by `dirichlet_environment`, in which clients share samples by definition. `natural` groups
by client ids that come with the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fedcohort.partition.assign import IndexArray
from fedcohort.partition.dirichlet import (
    dirichlet_environment,
    dirichlet_per_class,
    dirichlet_per_client,
    dirichlet_prior,
    uniform_plus_dirichlet,
)
from fedcohort.partition.labels import (
    iid,
    natural,
    one_label,
    quantity_skew,
    shards,
    skewness,
    uniform_sizes,
)

Partition: TypeAlias = Callable[..., list[IndexArray]]

PARTITIONS: dict[str, Partition] = {
    "iid": iid,
    "shards": shards,
    "dirichlet-per-client": dirichlet_per_client,
    "dirichlet-per-class": dirichlet_per_class,
    "dirichlet-prior": dirichlet_prior,
    "skewness": skewness,
    "one-label": one_label,
    "uniform-plus-dirichlet": uniform_plus_dirichlet,
    "dirichlet-environment": dirichlet_environment,
    "quantity-skew": quantity_skew,
    "uniform-sizes": uniform_sizes,
}

__all__ = [
    "PARTITIONS",
    "IndexArray",
    "Partition",
    "dirichlet_environment",
    "dirichlet_per_class",
    "dirichlet_per_client",
    "dirichlet_prior",
    "iid",
    "natural",
    "one_label",
    "quantity_skew",
    "shards",
    "skewness",
    "uniform_plus_dirichlet",
    "uniform_sizes",
]
