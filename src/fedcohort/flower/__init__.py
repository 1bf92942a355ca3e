"""Cohorts in a Flower federation: a strategy for the server, handlers for the clients.

`server` and `client` can be read alone; `wire` is what travels between them.
"""

from fedcohort.flower.client.answer import own_id as own_id
from fedcohort.flower.client.attach import attach as attach
from fedcohort.flower.client.privacy import Privacy as Privacy
from fedcohort.flower.server.asking import GridCollector as GridCollector
from fedcohort.flower.server.identity import Directory as Directory
from fedcohort.flower.server.record import KeptSketches as KeptSketches
from fedcohort.flower.server.record import RoundReport as RoundReport
from fedcohort.flower.server.strategy import CohortStrategy as CohortStrategy
from fedcohort.simulate.clock import Pace as Pace
