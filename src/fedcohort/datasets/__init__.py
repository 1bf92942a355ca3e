"""Data sets, and their division among clients."""

from fedcohort.datasets.base import Dataset, from_arrays
from fedcohort.datasets.catalog import DATASETS, DatasetStatus, available, load
from fedcohort.datasets.federation import Federation, federate

__all__ = [
    "DATASETS",
    "Dataset",
    "DatasetStatus",
    "Federation",
    "available",
    "federate",
    "from_arrays",
    "load",
]
