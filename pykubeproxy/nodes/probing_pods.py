"""Probes on the nodes of a cluster: orders to commands of ours in pods."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Self

import msgspec

from pykubeproxy.inspect.flows import parse_flows
from pykubeproxy.inspect.node import NodeState, Question, ReadError, UnknownNode
from pykubeproxy.kernel.conntrack import FirstPacket
from pykubeproxy.nodes.cluster import ClusterNodes, NodeAccess, NodePods, print_flows, side_by_side
from pykubeproxy.nodes.sending import ProbeOrder, SentProbes, find_flows, first_packet
from pykubeproxy.objects import Node
from pykubeproxy.sources.failures import Failure
from pykubeproxy.sources.pods import ContainerRef, NotInImage, run_in_pod
from pykubeproxy.wording import one_line

_PROTOCOLS = {6: "tcp", 17: "udp", 132: "sctp"}


class NodesInPods:
    """Nodes that carry out orders in the pods of their proxies, or in debug pods, which run within the context."""

    def __init__(self, access: NodeAccess, pods: NodePods, nodes: Sequence[Node]) -> None:
        self.access, self.pods, self.nodes = access, pods, nodes
        self._containers: dict[str, ContainerRef] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, sender: str, *, entering: bool) -> None:
        """Start the debug pods of all nodes, if there are any; that of the sender may enter pods. Raises ReadError."""
        if pods := self.access.debug_pods:

            def opened(node: Node) -> tuple[str, ContainerRef]:
                pod = pods.on(node.name, entering=entering and node.name == sender)
                return node.name, self._stack.enter_context(pod)

            try:
                self._containers = dict(side_by_side(opened, self.nodes, self.access.at_once))
            except Failure as failure:
                raise ReadError(f"no probe is sent: {failure}") from None

    def read(self, names: Collection[str]) -> Mapping[str, NodeState | UnknownNode]:
        """Read nodes again. See ProbedNodes."""
        wanted = [node for node in self.nodes if node.name in names]
        question = Question(nftables=True, firewalls=True)
        return {state.name: state for state in ClusterNodes(self.access, wanted).nodes(question)}

    def carry_out(self, node: str, order: ProbeOrder) -> SentProbes:
        """Have a node carry out an order. See ProbedNodes."""
        what = "no probe is sent on" if order.request else "conntrack is not read on"
        try:
            container = self._container(node)
            try:
                return self._ordered(container, order)
            except NotInImage:
                if order.request:
                    raise
                return self._taken(container, order)
        except NotInImage as failure:
            raise ReadError(
                f"{what} {node}: {failure}; use --debug-image with an image of pykubeproxy"
            ) from None
        except Failure as failure:
            raise ReadError(f"{what} {node}: {failure}") from None

    def _container(self, node: str) -> ContainerRef:
        if self.access.debug_pods:
            return self._containers[node]
        proxy = self.pods.proxy(Node(node))
        if proxy is None or not proxy.pod.runs:
            raise Failure("no pod of its proxy runs; use --debug-image")
        return proxy.target

    def _ordered(self, container: ContainerRef, order: ProbeOrder) -> SentProbes:
        text = msgspec.json.encode(order).decode()
        done = run_in_pod(self.access.client, container, ("pykubeproxy", "probe", text))
        if done.exit_code:
            raise Failure(one_line(done.errors).removeprefix("Error: "))
        try:
            return msgspec.json.decode(done.output, type=SentProbes)
        except ValueError as error:
            raise Failure(f"pykubeproxy in pod {container} gave no usable answer: {error}") from None

    def _taken(self, container: ContainerRef, order: ProbeOrder) -> SentProbes:
        """Return and remove flows with the programs of other images."""
        lines, unread, _ = print_flows(self.access.client, container)
        flows = find_flows(parse_flows(lines), order.take)
        for flow in filter(None, flows):
            run_in_pod(self.access.client, container, _delete_command(first_packet(flow)))
        return SentProbes(flows=flows, unread=unread or None)


def _delete_command(flow: FirstPacket) -> tuple[str, ...]:
    ends = (
        "-s",
        flow.source,
        "--sport",
        str(flow.source_port),
        "-d",
        flow.destination,
        "--dport",
        str(flow.port),
    )
    return ("conntrack", "-D", "-p", _PROTOCOLS[flow.protocol], *ends)
