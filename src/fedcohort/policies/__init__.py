"""Selection policies: one file each, all in the registry `POLICIES`."""

from fedcohort.policies.active_fl import ActiveFL as ActiveFL
from fedcohort.policies.base import POLICIES as POLICIES
from fedcohort.policies.base import Policy as Policy
from fedcohort.policies.base import register as register
from fedcohort.policies.bounded import Bounded as Bounded
from fedcohort.policies.clustered import ClusteredSampling as ClusteredSampling
from fedcohort.policies.delta import DELTA as DELTA
from fedcohort.policies.divfl import DivFL as DivFL
from fedcohort.policies.fed_cbs import FedCBS as FedCBS
from fedcohort.policies.fedacs import FedACS as FedACS
from fedcohort.policies.fedcor import FedCor as FedCor
from fedcohort.policies.fedsae import FedSAE as FedSAE
from fedcohort.policies.flips import FLIPS as FLIPS
from fedcohort.policies.haccs import HACCS as HACCS
from fedcohort.policies.hics_fl import HiCSFL as HiCSFL
from fedcohort.policies.kdpp import KDPP as KDPP
from fedcohort.policies.label_match import DCFedAvg as DCFedAvg
from fedcohort.policies.label_match import LabelMatch as LabelMatch
from fedcohort.policies.oort import Oort as Oort
from fedcohort.policies.power_of_choice import PowerOfChoice as PowerOfChoice
from fedcohort.policies.race_softmax import RaceSoftmax as RaceSoftmax
from fedcohort.policies.refl import REFL as REFL
from fedcohort.policies.sketch_match import SketchMatch as SketchMatch
from fedcohort.policies.sketch_to_select import SketchToSelect as SketchToSelect
from fedcohort.policies.tifl import TiFL as TiFL
from fedcohort.policies.uniform import Uniform as Uniform
