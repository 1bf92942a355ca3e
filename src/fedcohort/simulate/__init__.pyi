"""The names of the package and where they live: the one table of them."""

from .clock import Availability as Availability
from .clock import Bernoulli as Bernoulli
from .clock import Diurnal as Diurnal
from .clock import Durations as Durations
from .clock import Pace as Pace
from .clock import Trace as Trace
from .clock import UniformSubset as UniformSubset
from .local import LocalTraining as LocalTraining
from .local import Schedule as Schedule
from .models import MODELS as MODELS
from .models import build as build
from .models import embedding_of as embedding_of
from .simulation import Simulation as Simulation
from .simulation import simulate as simulate
