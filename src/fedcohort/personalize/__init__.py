"""Models for newcomers: a registry of warm clients, and a search for the nearest of them.

`finetune` needs PyTorch and is imported by its own name.
"""

from fedcohort.personalize.maintenance import Problem as Problem
from fedcohort.personalize.maintenance import check as check
from fedcohort.personalize.newcomers import Advice as Advice
from fedcohort.personalize.newcomers import ColdStart as ColdStart
from fedcohort.personalize.newcomers import Neighbor as Neighbor
from fedcohort.personalize.newcomers import nearest as nearest
from fedcohort.personalize.registry import Entry as Entry
from fedcohort.personalize.registry import Record as Record
from fedcohort.personalize.registry import Registry as Registry
