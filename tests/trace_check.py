"""Compare what connections in a lab see with what trace predicts."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from pykubeproxy import kernel
from pykubeproxy.inspect.packets.packet import NodeNetwork, NodeRoute, Packet
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.kernel import Backend, Runner, open_iptables
from pykubeproxy.kernel.network import routes
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.network import OUTSIDE_CROWD, Namespace, namespace_prefix
from pykubeproxy.lab.prober import Prober, ProbeResult, ProbeTarget
from pykubeproxy.objects import Family, family_of
from pykubeproxy.rules.ruleset import Ruleset
from tests.traces import PacketTrace, trace_packet

# Scenarios wait with single connections; the rules are about to change then.
_FEW = 3
# Largest accepted probability that no connection reaches an endpoint.
_CHANCE = 1e-9
_ERRORS = {PacketVerdict.REJECT: {"refused"}, PacketVerdict.DROP: {"timed out"}}


class TraceCheck:
    """Traces each probe of a lab whose rules stay unchanged, and asserts that the results agree.

    `compared` counts connections by verdict of the trace.
    """

    def __init__(self, lab: Lab, backend: Backend, patch: pytest.MonkeyPatch) -> None:
        self.compared: dict[str, int] = {}
        self._lab = lab
        self._backend = backend
        for protocol in ("tcp", "udp"):
            patch.setattr(Prober, protocol, self._checked(protocol, getattr(Prober, protocol)))

    def _checked(self, protocol: str, probe: Callable[..., ProbeResult]) -> Callable[..., ProbeResult]:
        @functools.wraps(probe)
        def checked(prober: Prober, target: ProbeTarget, count: int = 1, **options: object) -> ProbeResult:
            host_name = prober._namespace.name.removeprefix(namespace_prefix(self._lab.name))
            node = self._node_of(host_name, target)
            # Trace only the first of many client addresses: tracing is slow and affinity times out.
            another = options.get("source", OUTSIDE_CROWD[0]) != OUTSIDE_CROWD[0]
            if count < _FEW or another or node is None:
                return probe(prober, target, count, **options)
            before = self._rules(node, target)
            seen = probe(prober, target, count, **options)
            if self._rules(node, target) == before:
                source = str(options.get("source") or self._address(host_name, target))
                trace = self._trace(before, node, protocol, source, target, starts_here=host_name == node)
                self._agree(trace, seen, f"{protocol} from {host_name} ({source}) to {target}")
            return seen

        return checked

    def _node_of(self, host_name: str, target: ProbeTarget) -> str | None:
        """Return the node whose rules apply to the connection first."""
        if host_name in self._lab.nodes:
            return host_name
        if host_name in self._lab.pods:
            return self._lab.pods[host_name].site.name
        return next((name for name, it in self._lab.nodes.items() if target.address in it.addresses), None)

    def _address(self, host_name: str, target: ProbeTarget) -> str:
        pod, node = self._lab.pods.get(host_name), self._lab.nodes.get(host_name, self._lab.outside)
        return (pod.addresses if pod else node.addresses)[":" in target.address]

    def _inside(self, node: str) -> Namespace:
        return self._lab.nodes[node].namespace

    def _rules(self, node: str, target: ProbeTarget) -> Ruleset:
        runner = Runner(("ip", "netns", "exec", self._inside(node).name))
        return open_iptables(self._backend, family_of(target.address), runner).save()

    def _trace(
        self, ruleset: Ruleset, node: str, protocol: str, source: str, target: ProbeTarget, starts_here: bool
    ) -> PacketTrace:
        entered: AbstractContextManager[object] = self._inside(node).entered()
        with entered:
            host = _host(family_of(target.address))
        return trace_packet(ruleset, Packet(protocol, source, target.address, target.port, starts_here), host)

    def _agree(self, trace: PacketTrace, seen: ProbeResult, description: str) -> None:
        self.compared[trace.verdict.value] = self.compared.get(trace.verdict.value, 0) + seen.total
        pods = self._pods()
        traced = {pods.get(it.address, it.address): it for it in trace.endpoints}
        if trace.verdict is PacketVerdict.PASS:  # the destination need not be a pod
            assert set(seen.pods) <= {pods.get(trace.packet.destination, "")}, (
                f"{description}: {seen}; trace: pass"
            )
            return
        reached, clients = set(seen.pods), set(seen.clients)
        if seen.real_ips:  # the endpoint is an ingress controller, which connects to the pods
            reached, clients = {pods.get(client, client) for client in seen.clients}, set(seen.real_ips)
        assert reached <= set(traced), f"{description}: {seen}; trace: {sorted(traced)}"
        if trace.verdict in _ERRORS:
            assert not seen.pods and set(seen.errors) <= _ERRORS[trace.verdict], (
                f"{description}: {seen}; trace: {trace.verdict}"
            )
        if not trace.endpoints:
            return
        if not (seen.failed or _has_affinity(trace)):
            expected = {name for name, it in traced.items() if (1 - it.probability) ** seen.total < _CHANCE}
            assert expected <= reached, f"{description}: {seen}; trace: {sorted(expected)}"
        if not trace.packet.starts_here and all(it.masquerade for it in trace.endpoints):
            assert trace.packet.source not in clients, f"{description}: trace says its source is replaced"
        if not any(it.masquerade for it in trace.endpoints):
            assert clients <= {trace.packet.source}, f"{description}: {clients}; trace says it is kept"

    def _pods(self) -> dict[str, str]:
        """Return the names of pods by address, also of those that have ended."""
        pods = [*self._lab.pods.values(), *self._lab._ended]
        return {address: pod.name for pod in pods for address in pod.addresses}


def _has_affinity(trace: PacketTrace) -> bool:
    """Return whether a client stays with its endpoint."""
    return any("--rcheck" in step.rule for step in trace.steps)


def _host(family: Family) -> NodeNetwork:
    addresses = frozenset(it.address for it in kernel.local_addresses(family))
    return NodeNetwork(
        addresses, tuple(NodeRoute(route.network, route.interface) for route in routes(family))
    )
