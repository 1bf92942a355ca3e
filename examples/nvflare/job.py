"""Run it in NVFlare's simulator: ``python job.py [folder]``."""

from __future__ import annotations

import sys

from cohort_fedavg import CohortFedAvg
from nvflare.client.config import ExchangeFormat
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import FrameworkType, ScriptRunner

CLIENTS = 6


def main(folder: str = "nvflare-run", rounds: int = 4) -> None:
    job = FedJob(name="cohorts")
    job.to_server(CohortFedAvg(d=4, num_clients=2, num_rounds=rounds))
    for number in range(1, CLIENTS + 1):
        runner = ScriptRunner(
            script="client.py",
            framework=FrameworkType.NUMPY,
            server_expected_format=ExchangeFormat.NUMPY,
        )
        job.to(runner, f"site-{number}")
    job.simulator_run(folder)


if __name__ == "__main__":
    main(*sys.argv[1:2])
