"""A cluster of several raylets on this machine, for tests that need one."""

from __future__ import annotations

import tempfile
import warnings

import pytest

STORE = 100 << 20
SETTINGS = {
    "worker_niceness": 0,  # Ray's 15 leaves its workers hardly any time beside other tests
    # A killed node is noticed within about two seconds, and a slow one may answer.
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 3,
}


def pytest_collection_modifyitems(items):
    """Ray does not wait for the processes that it ends; Python warns about those."""
    for item in items:
        if "distribute" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
            quiet = "ignore::pytest.PytestUnraisableExceptionWarning"
            item.add_marker(pytest.mark.filterwarnings(quiet))


@pytest.fixture(scope="session")
def nodes():
    """Start a head without CPUs and two nodes with one each; yield what adds and removes nodes.

    A folder of their own keeps other tests from finding this cluster and joining it.
    """
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory("-ray") as place:
        patch.setenv("RAY_TMPDIR", place)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own = start()
        yield own
        import ray

        ray.shutdown()
        own.shutdown()


def start():
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": SETTINGS}
    own = Cluster(initialize_head=True, head_node_args={"object_store_memory": STORE, **head})
    for _ in range(2):
        own.add_node(num_cpus=1, object_store_memory=STORE)
    own.wait_for_nodes()
    return own


@pytest.fixture
def connected(nodes):
    """Be connected to the cluster."""
    from fedcohort.distribute import cluster

    with cluster(nodes.address):
        yield nodes
