"""The names of the package and where they live: the one table of them."""

from .availability import Always as Always
from .availability import Bernoulli as Bernoulli
from .availability import Diurnal as Diurnal
from .availability import Trace as Trace
from .availability import UniformSubset as UniformSubset
from .clock import Durations as Durations
from .clock import Pace as Pace
from .history import History as History
from .history import RoundRecord as RoundRecord
from .local import LocalTraining as LocalTraining
from .local import Schedule as Schedule
from .models import MODELS as MODELS
from .models import build as build
from .models import embedding_of as embedding_of
from .simulation import Simulation as Simulation
from .simulation import simulate as simulate
