"""Splits of a labeled data set over clients.

Every function in `PARTITIONS` is called `partition(labels, clients, rng, *, min_size=1, ...)` and
returns one ascending array of sample indices per client; `min_size` is the smallest allowed number
of samples per client. All samples are handed out, each once, except by `dirichlet_environment`, in
which clients share samples by definition. `natural` groups by client ids that come with the data.
"""

from fedcohort.partition.assign import PARTITIONS, IndexArray, Partition
from fedcohort.partition.splits import (
    dirichlet_environment,
    dirichlet_per_class,
    dirichlet_per_client,
    dirichlet_prior,
    iid,
    natural,
    one_label,
    shards,
    skewness,
    uniform_plus_dirichlet,
    uniform_sizes,
)

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
    "shards",
    "skewness",
    "uniform_plus_dirichlet",
    "uniform_sizes",
]
