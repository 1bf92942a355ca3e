from __future__ import annotations

import socket

import pytest

from fedcohort.distribute import cluster
from fedcohort.exceptions import ConfigError


def test_a_connected_program_stays_connected(connected):
    import ray

    with cluster("auto"), cluster(connected.address):
        assert ray.cluster_resources()["CPU"] == 2
    assert ray.is_initialized()
    with pytest.raises(ConfigError, match="connected to"), cluster("other:6379"):
        pass


def test_clusters_are_found_or_started_and_left(nodes):
    import ray

    ray.shutdown()
    with cluster("auto"):
        assert ray.get_runtime_context().gcs_address == nodes.address
    with cluster("local", cpus=1):
        assert ray.cluster_resources()["CPU"] == 1
        assert ray.get_runtime_context().gcs_address != nodes.address
    assert not ray.is_initialized()


def test_addresses_that_are_none():
    with socket.socket() as closed:  # bound, but nobody listens
        closed.bind(("127.0.0.1", 0))
        silent = f"127.0.0.1:{closed.getsockname()[1]}"
        for address in ("", "ray://head:10001", "head", silent):
            with pytest.raises(ConfigError, match=f"--ray {address}"), cluster(address):
                pass
