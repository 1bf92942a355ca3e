"""fedcohort: measure how different federated clients are, and pick better cohorts.

The names below are enough for each of the four jobs: measure, select, skip and personalize. They
are loaded when they are first used, so that ``import fedcohort`` is fast and needs no extra.

>>> import fedcohort
>>> fedcohort.RaceSketch.srp(dim=4, rows=10, bits=3)
RaceSketch(srp, 10 x 8, n=0)
"""

from importlib import import_module
from typing import Any

from lazy_loader import attach_stub

__version__ = "0.1.0"
_load, __dir__, __all__ = attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "simulate":  # the package of that name, which can be called as the function
        return import_module("fedcohort.simulate")
    return _load(name)
