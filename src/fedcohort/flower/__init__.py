"""Cohorts in a Flower federation: a strategy for the server, handlers for the clients.

`server` and `client` can be read alone; `wire` is what travels between them.
"""

from fedcohort.flower.client.answer import own_id
from fedcohort.flower.client.attach import attach
from fedcohort.flower.client.privacy import Privacy
from fedcohort.flower.server.asking import GridCollector
from fedcohort.flower.server.identity import Directory
from fedcohort.flower.server.record import KeptSketches, RoundReport
from fedcohort.flower.server.strategy import CohortStrategy
from fedcohort.simulate.clock import Pace

__all__ = [
    "CohortStrategy",
    "Directory",
    "GridCollector",
    "KeptSketches",
    "Pace",
    "Privacy",
    "RoundReport",
    "attach",
    "own_id",
]
