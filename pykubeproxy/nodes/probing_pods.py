"""Probes on the nodes of a cluster: orders to commands of ours in pods."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Self

import msgspec

from pykubeproxy.inspect.node import NodeState, Question, ReadError, UnknownNode
from pykubeproxy.kernel.conntrack import FirstPacket
from pykubeproxy.nodes.cluster import ClusterNodes, NodeAccess, NodePods
from pykubeproxy.nodes.probing import ProbeOrder, SentProbes
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

    def read(self, names: Collection[str], *, flows: bool) -> Mapping[str, NodeState | UnknownNode]:
        """Read nodes again. See ProbedNodes."""
        wanted = [node for node in self.nodes if node.name in names]
        question = Question(nftables=True, firewalls=True, flows=flows)
        return {state.name: state for state in ClusterNodes(self.access, wanted).nodes(question)}

    def carry_out(self, node: str, order: ProbeOrder) -> SentProbes:
        """Have a node carry out an order. See ProbedNodes."""
        try:
            container = self._container(node, entering=order.in_pod)
            try:
                return self._ordered(container, order)
            except NotInImage:
                if not order.forget:
                    raise
                for flow in order.forget:
                    run_in_pod(self.access.client, container, _delete_command(flow))
                return SentProbes()
        except NotInImage as failure:
            raise ReadError(
                f"no probe is sent on {node}: {failure}; use --debug-image with an image of pykubeproxy"
            ) from None
        except Failure as failure:
            raise ReadError(f"no probe is sent on {node}: {failure}") from None

    def _container(self, node: str, *, entering: bool) -> ContainerRef:
        if self.access.debug_pods:
            if node not in self._containers:
                pod = self.access.debug_pods.on(node, entering=entering)
                self._containers[node] = self._stack.enter_context(pod)
            return self._containers[node]
        proxy = self.pods.proxy(Node(node))
        if proxy is None or not proxy.pod.runs:
            raise ReadError(f"no probe is sent on {node}: no pod of its proxy runs; use --debug-image")
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
