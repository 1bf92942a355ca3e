"""Models for newcomers: a registry of warm clients, and a search for the nearest of them.

`finetune` needs PyTorch and is imported by its own name.
"""

from fedcohort.personalize.maintenance import Problem, check
from fedcohort.personalize.newcomers import Advice, ColdStart, Neighbor, nearest
from fedcohort.personalize.registry import Entry, Record, Registry

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
