"""Gates: whether models move at all after local training. One file each, all in `GATES`."""

from fedcohort.gates.base import GATES, Gate, register
from fedcohort.gates.cmfl import CMFL
from fedcohort.gates.optimal_sampling import OptimalSampling
from fedcohort.gates.sketch_to_skip import SketchToSkip, model_close

__all__ = ["CMFL", "GATES", "Gate", "OptimalSampling", "SketchToSkip", "model_close", "register"]
