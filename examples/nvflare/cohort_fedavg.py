"""NVFlare's FedAvg with cohorts of ours: the hook is `sample_clients`."""

from __future__ import annotations

import numpy as np
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.workflows.fedavg import FedAvg

from fedcohort.policies import PowerOfChoice
from fedcohort.session import Session


class CohortFedAvg(FedAvg):
    """Asks clients for their losses with a ``validate`` task, and trains with the worst served.

    Parameters
    ----------
    d : int
        Clients asked each round.
    seed : int
        Of the selection.
    timeout : int
        Seconds to wait for answers.
    num_clients, num_rounds : int
        As in FedAvg. A job's file holds what a controller was made with: numbers and texts.
    """

    def __init__(
        self,
        d: int = 4,
        seed: int = 0,
        timeout: int = 60,
        num_clients: int = 2,
        num_rounds: int = 4,
    ) -> None:
        super().__init__(
            num_clients=num_clients,
            num_rounds=num_rounds,
            persistor_id="",
            model={"weights": np.zeros((65, 10))},
            save_filename="model.fobs",
        )
        self.d, self.seed, self.timeout = d, seed, timeout
        self.session: Session | None = None
        self.latest: FLModel | None = None
        self.finished: set[str] = set()

    def sample_clients(self, num_clients: int | None = None) -> list[str]:
        """Pick the cohort among the clients that are online."""
        if self.session is None:
            policy = PowerOfChoice(d=self.d)
            self.session = Session(policy, cohort_size=num_clients, seed=self.seed)
        else:
            self.session.finish({}, self.finished)
        self.finished = set()
        online = [client.name for client in self.engine.get_clients()]
        cohort = list(self.session.begin(online, self._collect).clients)
        self.info(f"cohort of round {self.current_round}: {sorted(cohort)}")
        return cohort

    def _collect(self, signal: str, clients: tuple[str, ...]) -> dict[str, float]:
        model = self.latest or FLModel(params=self.model)
        model.current_round = self.current_round
        answers = self.send_model_and_wait(
            task_name="validate", targets=list(clients), data=model, timeout=self.timeout
        )
        return {a.meta["client_name"]: a.metrics[signal] for a in answers if a.metrics}

    def update_model(self, model: FLModel, model_update: FLModel, **options) -> FLModel:
        """Remember the global model, for the next question."""
        self.latest = super().update_model(model, model_update, **options)
        return self.latest

    def _aggregate_one_result(self, result: FLModel) -> bool:
        used = super()._aggregate_one_result(result)
        if used:
            self.finished.add(result.meta["client_name"])
        return used
