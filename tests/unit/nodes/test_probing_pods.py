"""Orders of probes run in debug pods, and none of these stays."""

import signal

import msgspec
import pytest

from pykubeproxy.inspect.node import ReadError
from pykubeproxy.kernel.conntrack import FirstPacket
from pykubeproxy.nodes.cluster import NodeAccess, NodePods
from pykubeproxy.nodes.debug_pods import DebugPods
from pykubeproxy.nodes.probing_pods import NodesInPods
from pykubeproxy.nodes.sending import ProbeOrder, SentProbes
from pykubeproxy.objects import Node
from pykubeproxy.sources import Client
from tests.fakes.remote_nodes import RemoteNodes

NODES = (Node("n1"), Node("n2"))
PACKET = FirstPacket(6, "10.244.1.9", 20000, "10.96.0.1", 80)
ENTRY = (
    "tcp 6 117 SYN_SENT src=10.244.1.9 dst=10.96.0.1 sport=20000 dport=80 [UNREPLIED]"
    " src=10.244.2.2 dst=10.244.1.9 sport=8080 dport=20000\n"
)


@pytest.fixture
def access(cluster: RemoteNodes, client: Client) -> NodeAccess:
    for node in NODES:
        cluster.node(node.name)
    return NodeAccess(client, debug_pods=DebugPods(client, "image:1", warn=pytest.fail))


def test_pods_of_all_nodes_start_before_probes_and_end_after_ctrl_c(
    cluster: RemoteNodes, access: NodeAccess
) -> None:
    answer = SentProbes(unread="answered")
    cluster.program("debug", "pykubeproxy", msgspec.json.encode(answer).decode())
    assert access.debug_pods
    with (
        pytest.raises(KeyboardInterrupt),
        access.debug_pods,
        NodesInPods(access, NodePods({}, {}), NODES) as nodes,
    ):
        nodes.open("n1", entering=True)
        assert len(cluster.debug_pods()) == 2
        assert nodes.carry_out("n2", ProbeOrder()) == answer
        signal.raise_signal(signal.SIGINT)
    assert cluster.debug_pods() == []


def test_flows_are_taken_with_the_programs_of_other_images(cluster: RemoteNodes, access: NodeAccess) -> None:
    cluster.program("debug", "conntrack", ENTRY)
    assert access.debug_pods
    with access.debug_pods, NodesInPods(access, NodePods({}, {}), NODES) as nodes:
        nodes.open("", entering=False)
        (flow, none) = nodes.carry_out("n1", ProbeOrder(take=(PACKET, None))).flows
    assert flow
    assert flow.translated_to == "10.244.2.2:8080"
    assert none is None


def test_node_without_a_pod_sends_no_probes(client: Client) -> None:
    nodes = NodesInPods(NodeAccess(client), NodePods({}, {}), NODES)
    with pytest.raises(ReadError, match="conntrack is not read on n1: no pod of its proxy runs"):
        nodes.carry_out("n1", ProbeOrder())
