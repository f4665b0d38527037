"""Judge the rules of the victim by walking packets through them, without the code that renders rules."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pykubeproxy.objects import Family, address_and_port, check
from pykubeproxy.rules.ruleset import Ruleset
from tests.fuzz.hostile_steps import (
    BALANCER_IP,
    CLUSTER_IP,
    EXTERNAL_IP,
    NODE_IP,
    VICTIM,
    VICTIM_PORTS,
    pod,
)
from tests.packet_model import Packet, Walker

CLIENT = {Family.IPV4: "203.0.113.9", Family.IPV6: "2001:db8:9::9"}  # in the victim's source ranges
STRANGER = {Family.IPV4: "198.18.0.9", Family.IPV6: "2001:db8:77::9"}  # not in them
POD = {Family.IPV4: "10.244.1.77", Family.IPV6: "fd00:10:244:1::77"}
# The most rules of table nat that a packet to the victim may visit before the victim's own chains.
MOST_VISITED = 1700

Claim = tuple[str, str, int]  # address, protocol, port


def claims(services: Iterable[dict[str, Any]]) -> frozenset[Claim]:
    """Return what other Services claim by external IPs and load balancer IPs: there, either may get the packets."""
    found: set[Claim] = set()
    for service in services:
        meta, spec = service["metadata"], service["spec"]
        if (meta["namespace"], meta["name"]) == VICTIM:
            continue
        ingress = service.get("status", {}).get("loadBalancer", {}).get("ingress") or []
        for address in (*(spec.get("externalIPs") or ()), *(it["ip"] for it in ingress)):
            for port in spec.get("ports") or ():
                found.add((check.address(address, ""), port.get("protocol", "TCP"), port["port"]))
    return frozenset(found)


class Destination(NamedTuple):
    """An address and port of the victim, and the port of its endpoints."""

    kind: str
    address: str
    port: int
    protocol: str
    target: int


def destinations(family: Family) -> Iterator[Destination]:
    """Yield all addresses and ports at which the victim is served."""
    for port, protocol, node_port, target in VICTIM_PORTS.values():
        yield Destination("cluster IP", CLUSTER_IP[family], port, protocol, target)
        yield Destination("external IP", EXTERNAL_IP[family], port, protocol, target)
        yield Destination("load balancer IP", BALANCER_IP[family], port, protocol, target)
        yield Destination("node port", NODE_IP[family], node_port, protocol, target)


def problems(ruleset: Ruleset, ready: int, claimed: frozenset[Claim]) -> Iterator[str]:
    """Yield what is wrong for packets to the victim, whose first `ready` pods are its endpoints."""
    walker, family = Walker(ruleset), ruleset.family
    for to in destinations(family):
        # An external IP must not take over a cluster IP that has endpoints; all else may be claimed.
        if (to.address, to.protocol, to.port) in claimed and not (to.kind == "cluster IP" and ready):
            continue
        for source in (CLIENT[family], STRANGER[family], POD[family]):
            for problem in _problems(walker, to, source, ready, claimed):
                yield f"{to} from {source}: {problem}"


def _problems(
    walker: Walker, to: Destination, source: str, ready: int, claimed: frozenset[Claim]
) -> Iterator[str]:
    family = Family.IPV6 if ":" in source else Family.IPV4
    local = to.kind == "node port"
    packet = Packet(
        source, to.address, to.protocol.lower(), to.port, local_destination=local, states=frozenset({"NEW"})
    )
    allowed = to.kind != "load balancer IP" or source == CLIENT[family]
    pods = [pod(family, n) for n in range(1, ready + 1)] if allowed else []
    expected = {f"to {address_and_port(address, to.target)}": 1 / ready for address in pods}
    outcomes = walker.walk(packet, "nat", "PREROUTING")
    if walker.visited > MOST_VISITED:
        yield f"the packet visits {walker.visited} rules"
    found = {outcome.verdict: share for outcome, share in outcomes.items() if outcome.verdict}
    if found.keys() != expected.keys() or any(abs(found[it] - expected[it]) > 1e-6 for it in found):
        yield f"{found} instead of {expected}"
    masquerades = to.kind != "cluster IP" or source != POD[family]
    if found and any(bool(outcome.mark) is not masquerades for outcome in outcomes):
        yield f"masquerading is not {masquerades}"
    if not pods:
        verdicts = {it.verdict for it in walker.walk(packet, "filter", "INPUT" if local else "FORWARD")}
        if verdicts != {"DROP" if ready else "REJECT"}:
            yield f"without endpoints, filter says {verdicts}"
    for address in pods:
        if (address, to.protocol, to.target) in claimed:
            continue  # A Service with a pod's address as its external IP claims the pod itself.
        onward = Packet(source, address, to.protocol.lower(), to.target, states=frozenset({"NEW", "DNAT"}))
        verdicts = {it.verdict for it in walker.walk(onward, "filter", "FORWARD")}
        if not verdicts <= {"", "ACCEPT"}:
            yield f"filter says {verdicts} to {address}"
