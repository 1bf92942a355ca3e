"""Cohorts in a Flower federation: a strategy for the server, handlers for the clients."""

from fedcohort.flower.client import attach
from fedcohort.flower.history import RoundReport
from fedcohort.flower.identity import own_id
from fedcohort.flower.privacy import Privacy
from fedcohort.flower.strategy import CohortStrategy

__all__ = ["CohortStrategy", "Privacy", "RoundReport", "attach", "own_id"]
