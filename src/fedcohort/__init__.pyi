"""The names of the package and where they live: the one table of them."""

from .analysis.heterogeneity import measure as measure
from .analysis.plan import plan as plan
from .datasets import federate as federate
from .datasets import load as load
from .exceptions import FedcohortError as FedcohortError
from .flower import CohortStrategy as CohortStrategy
from .flower import attach as attach
from .gates import GATES as GATES
from .gates import Gate as Gate
from .gates import SketchToSkip as SketchToSkip
from .personalize import ColdStart as ColdStart
from .personalize import Registry as Registry
from .policies import POLICIES as POLICIES
from .policies import Policy as Policy
from .policies import SketchMatch as SketchMatch
from .rounds import ClientId as ClientId
from .rounds import Outcome as Outcome
from .rounds import Round as Round
from .rounds import Selection as Selection
from .rounds import stream as stream
from .session import Session as Session
from .signals.catalog import SIGNALS as SIGNALS
from .signals.catalog import Needs as Needs
from .signals.catalog import Signal as Signal
from .signals.catalog import register_signal as register_signal
from .signals.table import Signals as Signals
from .simulate import LocalTraining as LocalTraining
from .simulate import build as build
from .simulate import simulate as simulate
from .sketch.distances import distance_matrix as distance_matrix
from .sketch.race import RaceSketch as RaceSketch
from .sketch.transforms import Transform as Transform
from .testing import check_policy as check_policy

__version__: str
