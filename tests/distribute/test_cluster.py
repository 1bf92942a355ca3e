from __future__ import annotations

import socket

import pytest

from fedcohort.distribute.cluster import cluster, gpus_for
from fedcohort.exceptions import ConfigError


def test_a_connected_program_stays_connected(connected):
    import ray

    with cluster("auto"), cluster(connected.address):
        assert ray.cluster_resources()["CPU"] == 2
        assert [gpus_for(device) for device in ("cpu", "auto", "cuda:0")] == [0, 0, 1]
    assert ray.is_initialized()
    with pytest.raises(ConfigError, match="is connected to"), cluster("other:6379"):
        pass


def test_a_local_cluster_ends_with_the_work(nodes):
    import ray

    ray.shutdown()
    with cluster("local", cpus=1):
        assert ray.cluster_resources()["CPU"] == 1
        assert ray.get_runtime_context().gcs_address != nodes.address
    assert not ray.is_initialized()


def test_a_running_cluster_is_found(nodes):
    import ray

    with cluster("auto"):
        assert ray.get_runtime_context().gcs_address == nodes.address
    assert not ray.is_initialized()


def test_addresses_that_are_none():
    for address in ("", "ray://head:10001", "head"):
        with pytest.raises(ConfigError, match="local, auto or HOST:PORT"), cluster(address):
            pass
    with socket.socket() as closed:  # bound, but nobody listens
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(ConfigError, match="no cluster answers"), cluster(address):
            pass
