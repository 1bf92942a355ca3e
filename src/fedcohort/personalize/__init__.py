"""Models for newcomers: a registry of warm clients, and a search for the nearest of them.

`finetune` needs PyTorch and is imported by its own name.
"""

from fedcohort.personalize.advice import Advice, ColdStart
from fedcohort.personalize.maintenance import Problem, check
from fedcohort.personalize.registry import Entry, Record, Registry
from fedcohort.personalize.search import Neighbor, nearest

__all__ = [
    "Advice",
    "ColdStart",
    "Entry",
    "Neighbor",
    "Problem",
    "Record",
    "Registry",
    "check",
    "nearest",
]
