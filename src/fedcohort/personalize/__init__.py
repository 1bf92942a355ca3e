"""Models for newcomers: a registry of warm clients, and who among them is near.

`finetune` needs PyTorch and is imported by its own name.
"""

from fedcohort.personalize.cold_start import Advice, ColdStart
from fedcohort.personalize.integrity import Problem, check, remove_orphans
from fedcohort.personalize.limits import Limit
from fedcohort.personalize.records import Entry, Record
from fedcohort.personalize.registry import Registry
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
