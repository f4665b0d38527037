"""No external address of a Service takes over the health and metrics pages of the agent."""

import pytest

from pykubeproxy.config import load
from pykubeproxy.objects import Family, Node, Port, Protocol, Updated
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.render import render
from pykubeproxy.services.cluster import Cluster
from tests.objects import endpoint, service, slice_of
from tests.strategies import NODE

ADDRESSES = ("192.0.2.1", "203.0.113.1", "fd00::1", "fd00::2")


def served(
    family: Family, ports: dict[int, Protocol], node: bool = True, **flags: str
) -> set[tuple[str, int]]:
    """Return where rules serve a Service with these ports that claims all addresses of the node, and one more."""
    four = family is Family.IPV4
    claimed = tuple(it for it in (*ADDRESSES, "203.0.113.99", "fd00::99") if (":" in it) is not four)
    numbers = tuple(Port(f"p{number}", protocol, number) for number, protocol in ports.items())
    it = service(cluster_ip="10.96.0.10" if four else "fd96::10", ports=numbers, external_ips=claimed)
    cluster = Cluster()
    for object_ in (it, slice_of(endpoint("10.244.0.5" if four else "fd00:244::5"), ports=numbers_of(ports))):
        cluster.apply(Updated(object_))
    here = Node(NODE, addresses=ADDRESSES) if node else None
    context = rule_context(load(None, flags).config, NODE, here, KernelFacts(), family)
    rules = [rule for chain in render(cluster, context).chains.values() for rule in chain]
    length = 32 if four else 128
    return {
        (address, number)
        for address in claimed
        for number in ports
        if any(f"-d {address}/{length}" in rule and f"--dport {number} " in rule for rule in rules)
    }


def numbers_of(ports: dict[int, Protocol]) -> tuple[object, ...]:
    from pykubeproxy.objects import EndpointPort

    return tuple(EndpointPort(f"p{number}", protocol, 8080) for number, protocol in ports.items())


TCP, UDP = Protocol.TCP, Protocol.UDP


@pytest.mark.parametrize("family", Family)
def test_the_health_port_at_addresses_of_the_node_is_skipped(family: Family) -> None:
    """Other ports, and other addresses, are served. So is the metrics port: by default it is only on loopback."""
    own = [it for it in ADDRESSES if (":" in it) is (family is Family.IPV6)]
    other = "203.0.113.99" if family is Family.IPV4 else "fd00::99"
    ports = (10249, 10256, 10257)
    expected = {(address, port) for address in (*own, other) for port in ports} - {(it, 10256) for it in own}
    assert served(family, dict.fromkeys(ports, TCP)) == expected


def test_other_protocols_are_served() -> None:
    assert ("192.0.2.1", 10256) in served(Family.IPV4, {10256: UDP})


@pytest.mark.parametrize(
    ("flags", "skipped"),
    [
        ({"metrics-bind-address": "0.0.0.0:10249"}, {("192.0.2.1", 10249), ("203.0.113.1", 10249)}),
        ({"metrics-bind-address": "203.0.113.1:9000"}, {("203.0.113.1", 9000)}),
        ({"healthz-bind-address": "[::]:9001"}, {("192.0.2.1", 9001), ("203.0.113.1", 9001)}),
        ({"healthz-bind-address": "203.0.113.99:9001"}, {("203.0.113.99", 9001)}),
        ({"healthz-bind-address": "127.0.0.1:9001"}, set()),
        ({"healthz-bind-address": ""}, None),
    ],
)
def test_the_configured_addresses_and_ports_are_skipped(
    flags: dict[str, str], skipped: set[tuple[str, int]] | None
) -> None:
    """An unspecified address means those of the node, of both families."""
    ports = dict.fromkeys((9000, 9001, 10249), TCP)
    everything = {(it, port) for it in (*ADDRESSES[:2], "203.0.113.99") for port in ports}
    assert everything - served(Family.IPV4, ports, **flags) == (skipped or set())


def test_a_bind_address_is_an_address_of_the_node() -> None:
    """While the Node is not known."""
    flags = {"bind-address": "203.0.113.1"}
    found = served(Family.IPV4, {10256: TCP}, node=False, **flags)
    assert found == {("192.0.2.1", 10256), ("203.0.113.99", 10256)}
