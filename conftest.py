"""What is collected, and in which order.

Modules that cannot be imported everywhere are not searched for doctests where they cannot. The
longest files come first, so that no worker waits for the other at the end.
"""

from importlib.util import find_spec

collect_ignore_glob = []
if find_spec("triton") is None:
    collect_ignore_glob.append("src/fedcohort/**/_*triton*.py")

LONGEST = ("test_deployment.py", "test_simulation.py", "test_docs.py", "test_site.py", "soak")


def pytest_collection_modifyitems(items):
    """Sort the longest files to the front; the order within a file stays."""

    def place(item):
        return next((i for i, name in enumerate(LONGEST) if name in item.nodeid), len(LONGEST))

    items.sort(key=place)
