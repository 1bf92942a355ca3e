"""What is collected, in which order, and what every test leaves behind."""

from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

# No test fails because a loaded machine is slow.
settings.register_profile(
    "any speed",  # of the machine; and a test may write the files of all its examples to one folder
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("any speed")

collect_ignore_glob = ["tests/soak/[!t]*.py"]  # drivers
if find_spec("triton") is None:  # a module that cannot be imported is not searched for doctests
    collect_ignore_glob.append("src/**/_*triton*.py")

#: The files that take longest. They start first, so that no worker waits for the other at the
#: end; parts of their names, the longest first.
LONGEST = (
    "flower/test_deployment",
    "distribute/",  # while the other worker deploys, so that one worker starts one cluster
    "tests/test_docs",
    "flower/test_simulation",
    "report/test_run_page",
    "cli/test_cli",
    "soak/",
)


def pytest_collection_modifyitems(items):
    """Sort the longest files to the front; the order within a file stays."""

    def place(item):
        return next((i for i, name in enumerate(LONGEST) if name in item.nodeid), len(LONGEST))

    items.sort(key=place)


@pytest.fixture(autouse=True)
def registries_as_before():
    """Remove what a test or a doctest registered, so that no other one depends on it."""
    from fedcohort.gates import GATES
    from fedcohort.policies import POLICIES
    from fedcohort.signals.catalog import SIGNALS

    before = [(registry, dict(registry)) for registry in (POLICIES, GATES, SIGNALS)]
    yield
    for registry, held in before:
        if registry != held:
            registry.clear()
            registry.update(held)
