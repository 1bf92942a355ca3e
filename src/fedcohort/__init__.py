"""fedcohort: measure how different federated clients are, and pick better cohorts.

The names below are enough for each of the four jobs: measure, select, skip and personalize. They
are loaded when they are first used, so that ``import fedcohort`` is fast and needs no extra.

>>> import fedcohort
>>> fedcohort.RaceSketch.srp(dim=4, rows=10, bits=3)
RaceSketch(srp, 10 x 8, n=0)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcohort.analysis.heterogeneity import measure
    from fedcohort.analysis.plan import plan
    from fedcohort.datasets import federate, load
    from fedcohort.exceptions import FedcohortError
    from fedcohort.flower import CohortStrategy, attach
    from fedcohort.gates import GATES, Gate, SketchToSkip
    from fedcohort.personalize import ColdStart, Registry
    from fedcohort.policies import POLICIES, Policy, SketchMatch
    from fedcohort.rounds import ClientId, Outcome, Round, Selection, stream
    from fedcohort.session import Session
    from fedcohort.signals.catalog import SIGNALS, Needs, Signal, register_signal
    from fedcohort.signals.table import Signals
    from fedcohort.simulate import LocalTraining, build, simulate
    from fedcohort.sketch.distances import distance_matrix
    from fedcohort.sketch.race import RaceSketch
    from fedcohort.sketch.transforms import Transform
    from fedcohort.testing import check_policy

__version__ = "0.1.0"

_HOME = {
    "ClientId": "rounds",
    "CohortStrategy": "flower",
    "ColdStart": "personalize",
    "FedcohortError": "exceptions",
    "GATES": "gates",
    "Gate": "gates",
    "LocalTraining": "simulate",
    "Needs": "signals.catalog",
    "Outcome": "rounds",
    "POLICIES": "policies",
    "Policy": "policies",
    "RaceSketch": "sketch.race",
    "Registry": "personalize",
    "Round": "rounds",
    "SIGNALS": "signals.catalog",
    "Selection": "rounds",
    "Session": "session",
    "Signal": "signals.catalog",
    "Signals": "signals.table",
    "SketchMatch": "policies",
    "SketchToSkip": "gates",
    "Transform": "sketch.transforms",
    "attach": "flower",
    "build": "simulate",
    "check_policy": "testing",
    "distance_matrix": "sketch.distances",
    "federate": "datasets",
    "load": "datasets",
    "measure": "analysis.heterogeneity",
    "plan": "analysis.plan",
    "register_signal": "signals.catalog",
    "simulate": "simulate",
    "stream": "rounds",
}

__all__ = [
    "GATES",
    "POLICIES",
    "SIGNALS",
    "ClientId",
    "CohortStrategy",
    "ColdStart",
    "FedcohortError",
    "Gate",
    "LocalTraining",
    "Needs",
    "Outcome",
    "Policy",
    "RaceSketch",
    "Registry",
    "Round",
    "Selection",
    "Session",
    "Signal",
    "Signals",
    "SketchMatch",
    "SketchToSkip",
    "Transform",
    "attach",
    "build",
    "check_policy",
    "distance_matrix",
    "federate",
    "load",
    "measure",
    "plan",
    "register_signal",
    "simulate",
    "stream",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
