"""Training many clients at once, and the rounds around it (needs PyTorch).

Names are loaded when they are first used, so that importing the package stays cheap.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcohort.simulate.availability import Always, Bernoulli, Durations, Trace, UniformSubset
    from fedcohort.simulate.history import History, RoundRecord
    from fedcohort.simulate.local import LocalTraining, Schedule
    from fedcohort.simulate.models import MODELS, build, embedding_of
    from fedcohort.simulate.simulation import Simulation, simulate

_HOME = {
    "Always": "availability",
    "Bernoulli": "availability",
    "Durations": "availability",
    "History": "history",
    "LocalTraining": "local",
    "MODELS": "models",
    "RoundRecord": "history",
    "Schedule": "local",
    "Simulation": "simulation",
    "Trace": "availability",
    "UniformSubset": "availability",
    "build": "models",
    "embedding_of": "models",
    "simulate": "simulation",
}

__all__ = [
    "MODELS",
    "Always",
    "Bernoulli",
    "Durations",
    "History",
    "LocalTraining",
    "RoundRecord",
    "Schedule",
    "Simulation",
    "Trace",
    "UniformSubset",
    "build",
    "embedding_of",
    "simulate",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


class _Package(ModuleType):
    """``from fedcohort import simulate`` finds this package, not the function of that name.

    Python prefers a submodule to the package's ``__getattr__``, so the package can be called.
    """

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.simulate(*arguments, **options)


sys.modules[__name__].__class__ = _Package
