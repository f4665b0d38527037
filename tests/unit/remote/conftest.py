"""A cluster whose nodes are read from outside."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pykubeproxy.objects import Kind, Node
from pykubeproxy.remote import DebugPods, NodeAccess, ReadNode, UnreadNode, read_nodes
from pykubeproxy.sources import Client, list_kind
from tests.fakes.remote_nodes import RemoteNodes


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RemoteNodes]:
    with RemoteNodes(tmp_path) as running:
        yield running


@pytest.fixture
def client(cluster: RemoteNodes) -> Client:
    return Client(str(cluster.kubeconfig), qps=-1)


@pytest.fixture
def read(client: Client) -> Callable[..., dict[str, ReadNode | UnreadNode]]:
    """Read all nodes; return the outcome by name."""

    def outcome(
        *, pod_selector: str = "", pod_namespace: str = "", debug_image: str = "", at_once: int = 4
    ) -> dict[str, ReadNode | UnreadNode]:
        nodes = [it for it in list_kind(client, Kind.NODE).objects if isinstance(it, Node)]
        with DebugPods(client, debug_image, warn=pytest.fail) as debug_pods:
            access = NodeAccess(client, pod_selector, pod_namespace, debug_pods if debug_image else None)
            return {it.node.name: it for it in read_nodes(access, nodes, at_once=at_once)}

    return outcome
