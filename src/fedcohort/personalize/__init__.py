"""Models for newcomers: a registry of warm clients, and a search for the nearest of them.

`finetune` needs PyTorch and is imported by its own name.
"""

from fedcohort.personalize.cold_start import Advice, ColdStart
from fedcohort.personalize.integrity import Problem, check, remove_orphans
from fedcohort.personalize.limits import Limit
from fedcohort.personalize.registry import Entry, Record, Registry
from fedcohort.personalize.search import Neighbor, Search

__all__ = [
    "Advice",
    "ColdStart",
    "Entry",
    "Limit",
    "Neighbor",
    "Problem",
    "Record",
    "Registry",
    "Search",
    "check",
    "remove_orphans",
]
