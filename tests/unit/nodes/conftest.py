"""A cluster whose nodes are read from outside."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pykubeproxy.inspect.node import NodeState, Question, UnknownNode
from pykubeproxy.nodes.cluster import ClusterNodes, NodeAccess
from pykubeproxy.nodes.debug_pods import DebugPods
from pykubeproxy.objects import Kind, Node
from pykubeproxy.sources import Client
from pykubeproxy.sources.queries import list_kind
from tests.fakes.remote_nodes import RemoteNodes


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RemoteNodes]:
    with RemoteNodes(tmp_path) as running:
        yield running


@pytest.fixture
def client(cluster: RemoteNodes) -> Client:
    return Client(str(cluster.kubeconfig), qps=-1)


@pytest.fixture
def read(client: Client) -> Callable[..., dict[str, NodeState | UnknownNode]]:
    """Read all nodes; return the outcome by name."""

    def outcome(
        *,
        pod_selector: str = "",
        pod_namespace: str = "",
        debug_image: str = "",
        at_once: int = 4,
        nftables: bool = False,
        flows: bool = False,
    ) -> dict[str, NodeState | UnknownNode]:
        nodes = [it for it in list_kind(client, Kind.NODE).objects if isinstance(it, Node)]
        with DebugPods(client, debug_image, warn=pytest.fail) as debug_pods:
            access = NodeAccess(
                client, pod_selector, pod_namespace, debug_pods if debug_image else None, at_once
            )
            question = Question(nftables=nftables, firewalls=nftables, flows=flows)
            return {it.node.name: it for it in ClusterNodes(access, nodes).nodes(question)}

    return outcome
