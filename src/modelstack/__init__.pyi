"""The names of the package and where they live: the one table of them."""

from .jobs import Data as Data
from .jobs import Job as Job
from .jobs import by_length as by_length
from .kernel import SampleLoss as SampleLoss
from .switches import seeded as seeded
from .trainer import Trainer as Trainer
from .trainer import device_name as device_name
from .training import BatchPlan as BatchPlan
from .training import Ints as Ints
from .training import Training as Training
from .training import Unsupported as Unsupported
from .worker import first_dense as first_dense
