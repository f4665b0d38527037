"""Holds what connections in a lab saw against what trace says of them."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from pykubeproxy import kernel
from pykubeproxy.inspect.routes import Verdict
from pykubeproxy.inspect.trace.model import Trace, trace_packet
from pykubeproxy.inspect.trace.packet import Host, Packet, Route
from pykubeproxy.kernel import Backend, Runner, open_iptables
from pykubeproxy.kernel.addresses import routes
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.network import CLIENT_CROWD, Namespace, namespace_prefix
from pykubeproxy.lab.prober import Prober, ProbeResult, Target
from pykubeproxy.objects import Family, family_of
from pykubeproxy.rules.ruleset import Ruleset

# Single connections are for waiting: rules are about to change then.
_FEW = 3
# A share may come to nothing by chance as seldom as this.
_CHANCE = 1e-9
_ERRORS = {Verdict.REJECT: {"refused"}, Verdict.DROP: {"timeout"}}


class TraceCheck:
    """Follows the probes of a lab: of each whose rules did not change meanwhile, trace has to tell what it saw.

    `compared` counts those by what trace said of them.
    """

    def __init__(self, lab: Lab, backend: Backend, patch: pytest.MonkeyPatch) -> None:
        self.compared: dict[str, int] = {}
        self._lab = lab
        self._backend = backend
        for protocol in ("tcp", "udp"):
            patch.setattr(Prober, protocol, self._watched(protocol, getattr(Prober, protocol)))

    def _watched(self, protocol: str, probe: Callable[..., ProbeResult]) -> Callable[..., ProbeResult]:
        @functools.wraps(probe)
        def watched(prober: Prober, target: Target, count: int = 1, **options: object) -> ProbeResult:
            place = prober._namespace.name.removeprefix(namespace_prefix(self._lab.name))
            where = self._node_of(place, target)
            # Of clients that look like many one will do: looking takes time, and affinity runs out.
            another = options.get("source", CLIENT_CROWD[0]) != CLIENT_CROWD[0]
            if count < _FEW or another or where is None:
                return probe(prober, target, count, **options)
            before = self._rules(where, target)
            seen = probe(prober, target, count, **options)
            if self._rules(where, target) == before:
                source = str(options.get("source") or self._address(place, target))
                told = self._trace(before, where, protocol, source, target, starts_here=place == where)
                self._agree(told, seen, f"{protocol} from {place} ({source}) to {target}")
            return seen

        return watched

    def _node_of(self, place: str, target: Target) -> str | None:
        """The node whose rules a connection meets first."""
        if place in self._lab.nodes:
            return place
        if place in self._lab.pods:
            return self._lab.pods[place].site.name
        return next((name for name, it in self._lab.nodes.items() if target.address in it.addresses), None)

    def _address(self, place: str, target: Target) -> str:
        pod, node = self._lab.pods.get(place), self._lab.nodes.get(place, self._lab.client)
        return (pod.addresses if pod else node.addresses)[":" in target.address]

    def _inside(self, node: str) -> Namespace:
        return self._lab.nodes[node].namespace

    def _rules(self, node: str, target: Target) -> Ruleset:
        runner = Runner(("ip", "netns", "exec", self._inside(node).name))
        return open_iptables(self._backend, family_of(target.address), runner).save()

    def _trace(
        self, ruleset: Ruleset, node: str, protocol: str, source: str, target: Target, starts_here: bool
    ) -> Trace:
        entered: AbstractContextManager[object] = self._inside(node).entered()
        with entered:
            host = _host(family_of(target.address))
        return trace_packet(ruleset, Packet(protocol, source, target.address, target.port, starts_here), host)

    def _agree(self, told: Trace, seen: ProbeResult, what: str) -> None:
        self.compared[told.verdict.value] = self.compared.get(told.verdict.value, 0) + seen.total
        pods = {address: pod.name for pod in self._pods() for address in pod.addresses}
        said = {pods.get(it.address, it.address): it for it in told.endpoints}
        if told.verdict is Verdict.PASS:  # it gets where it wants to go, and who is there need not be a pod
            assert set(seen.pods) <= {pods.get(told.packet.destination, "")}, f"{what}: {seen}; trace: pass"
            return
        reached, clients = set(seen.pods), set(seen.clients)
        if seen.real_ips:  # the endpoint is an ingress controller, which goes on to the pods itself
            reached, clients = {pods.get(client, client) for client in seen.clients}, set(seen.real_ips)
        assert reached <= set(said), f"{what}: {seen}; trace: {sorted(said)}"
        if told.verdict in _ERRORS:
            assert not seen.pods and set(seen.errors) <= _ERRORS[told.verdict], (
                f"{what}: {seen}; trace: {told.verdict}"
            )
        if not told.endpoints:
            return
        if not (seen.failed or _sticks(told)):
            sure = {name for name, it in said.items() if (1 - it.probability) ** seen.total < _CHANCE}
            assert sure <= reached, f"{what}: {seen}; trace: {sorted(sure)}"
        if not told.packet.starts_here and all(it.masquerade for it in told.endpoints):
            assert told.packet.source not in clients, f"{what}: trace says its source is replaced"
        if not any(it.masquerade for it in told.endpoints):
            assert clients <= {told.packet.source}, f"{what}: {clients}; trace says it is kept"

    def _pods(self) -> list[object]:
        return [*self._lab.pods.values(), *self._lab._ended]


def _sticks(told: Trace) -> bool:
    """Whether a client stays with its endpoint."""
    return any("--rcheck" in step.rule for step in told.steps)


def _host(family: Family) -> Host:
    addresses = frozenset(it.address for it in kernel.local_addresses(family))
    return Host(addresses, tuple(Route(*route) for route in routes(family)))
