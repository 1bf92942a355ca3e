"""Selection policies: one file each, all in the registry `POLICIES`."""

from fedcohort.policies.active_fl import ActiveFL
from fedcohort.policies.base import POLICIES, Policy, register
from fedcohort.policies.oort import Oort
from fedcohort.policies.power_of_choice import PowerOfChoice
from fedcohort.policies.uniform import Uniform

__all__ = [
    "POLICIES",
    "ActiveFL",
    "Oort",
    "Policy",
    "PowerOfChoice",
    "Uniform",
    "register",
]
