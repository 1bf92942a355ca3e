"""Selection policies: one file each, all in the registry `POLICIES`."""

from fedcohort.policies.active_fl import ActiveFL
from fedcohort.policies.base import POLICIES, Policy, register
from fedcohort.policies.bounded import Bounded
from fedcohort.policies.clustered import ClusteredSampling
from fedcohort.policies.delta import DELTA
from fedcohort.policies.divfl import DivFL
from fedcohort.policies.fed_cbs import FedCBS
from fedcohort.policies.fedacs import FedACS
from fedcohort.policies.fedcor import FedCor
from fedcohort.policies.fedsae import FedSAE
from fedcohort.policies.flips import FLIPS
from fedcohort.policies.haccs import HACCS
from fedcohort.policies.hics_fl import HiCSFL
from fedcohort.policies.kdpp import KDPP
from fedcohort.policies.label_match import DCFedAvg, LabelMatch
from fedcohort.policies.oort import Oort
from fedcohort.policies.power_of_choice import PowerOfChoice
from fedcohort.policies.race_softmax import RaceSoftmax
from fedcohort.policies.refl import REFL
from fedcohort.policies.sketch_match import SketchMatch
from fedcohort.policies.sketch_to_select import SketchToSelect
from fedcohort.policies.tifl import TiFL
from fedcohort.policies.uniform import Uniform

__all__ = [
    "DELTA",
    "FLIPS",
    "HACCS",
    "KDPP",
    "POLICIES",
    "REFL",
    "ActiveFL",
    "Bounded",
    "ClusteredSampling",
    "DCFedAvg",
    "DivFL",
    "FedACS",
    "FedCBS",
    "FedCor",
    "FedSAE",
    "HiCSFL",
    "LabelMatch",
    "Oort",
    "Policy",
    "PowerOfChoice",
    "RaceSoftmax",
    "SketchMatch",
    "SketchToSelect",
    "TiFL",
    "Uniform",
    "register",
]
