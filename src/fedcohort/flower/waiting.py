"""The grid that an inner strategy sees: clients that are known, and a limit to waiting."""

from __future__ import annotations

import time
from collections.abc import Iterable

from flwr.serverapp import Grid

from fedcohort.exceptions import NoClients
from fedcohort.flower.exchange import TimedGrid
from fedcohort.flower.identity import Directory


class PatientGrid(TimedGrid):
    """Shows the nodes that said who they are; a strategy may wait for more, but not for ever.

    Flower's strategies ask for the nodes again and again until there are enough. The first
    question starts the clock.
    """

    def __init__(self, grid: Grid, directory: Directory, wait: float, timeout: float) -> None:
        super().__init__(grid, timeout)
        self.directory, self.wait = directory, wait
        self._asked = 0
        self._start = time.monotonic()

    def get_node_ids(self) -> Iterable[int]:
        """Return the known nodes; NoClients once the strategy has waited too long for more."""
        nodes = sorted(self.directory.refresh(self.grid).values())
        self._asked += 1
        waited = time.monotonic() - self._start
        if self._asked > 3 and waited > self.wait:
            raise NoClients(
                f"too few clients: {len(nodes)} online after {waited:.0f} s, and the strategy "
                "still waits for more; start more SuperNodes, lower its min_available_nodes and "
                "min_train_nodes, or raise CohortStrategy(wait=...)"
            )
        return nodes
