"""fedcohort: measure how different federated clients are, and pick better cohorts."""

from __future__ import annotations

from fedcohort.exceptions import FedcohortError
from fedcohort.policies import POLICIES, Policy
from fedcohort.rounds import ClientId, Outcome, Round, Selection, stream
from fedcohort.session import Session
from fedcohort.signals.catalog import SIGNALS, Needs, Signal
from fedcohort.signals.table import Signals

__version__ = "0.1.0"

__all__ = [
    "POLICIES",
    "SIGNALS",
    "ClientId",
    "FedcohortError",
    "Needs",
    "Outcome",
    "Policy",
    "Round",
    "Selection",
    "Session",
    "Signal",
    "Signals",
    "stream",
]
