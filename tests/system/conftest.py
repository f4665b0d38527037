"""Fixtures for tests of the agent process."""

from collections.abc import Iterator

import pytest

from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.faulty_apiserver import FaultyApiServer
from tests.fakes.process import inside_a_namespace


@pytest.fixture
def api() -> Iterator[FaultyApiServer]:
    """An API server with one service, in a namespace for the test and its agents."""
    with inside_a_namespace(), server() as made:
        made.store.create(node("node1", "192.168.99.10"))
        made.store.create(service("web", clusterIP="10.96.0.10"))
        made.store.create(slice_of("web", "10.244.0.5"))
        yield made
