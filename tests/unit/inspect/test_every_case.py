"""The views of every recorded case agree with its objects."""

import pytest

from pykubeproxy.inspect.dump.model import PacketVerdict, ServiceView, views
from pykubeproxy.inspect.routes import Policy
from pykubeproxy.objects import Family
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.endpoints import ResolvedEndpoint
from pykubeproxy.services.ports import FrontendKind, PortName, ServicePort
from pykubeproxy.services.selection import ResolvedPort, resolve_ports
from tests.cases import ADDRESSES, NAMES, cluster_of, config_of, expected, load_case, node_of


def resolved_ports(name: str, family: Family) -> dict[PortName, ResolvedPort]:
    case = load_case(name)
    rules_context = rule_context(config_of(case), "node1", node_of(case), KernelFacts(ADDRESSES), family)
    cluster = cluster_of(case)
    return {
        item.port.name: item
        for service in cluster.services()
        for item in resolve_ports(
            cluster, service.key, family, rules_context.node, rules_context.allow_external_ips
        )
    }


def targets(view: ServiceView) -> set[str]:
    return {
        f"[{e.address}]:{e.port}" if ":" in e.address else f"{e.address}:{e.port}" for e in view.endpoints
    }


def addresses(port: ServicePort) -> set[tuple[str, int]]:
    """Return the addresses and ports of a service port; node ports without address."""
    ips = (port.cluster_ip, *port.external_ips, *port.load_balancer_ips)
    return {*((ip, port.port) for ip in ips), *([("node", port.node_port)] if port.node_port else [])}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", Family)
def test_views_have_the_selected_endpoints_and_all_frontends(name: str, family: Family) -> None:
    """Each policy has equal shares for exactly its selected endpoints."""
    shown: dict[PortName, dict[Policy, ServiceView]] = {}
    for view in views(expected(load_case(name), family), {}):
        shown.setdefault(view.name, {})[view.policy] = view
    items = resolved_ports(name, family)
    assert shown.keys() == items.keys()
    for port_name, item in items.items():
        by_policy = shown[port_name]
        check_endpoints(by_policy.get(Policy.CLUSTER), item.selection.cluster)
        check_endpoints(by_policy.get(Policy.LOCAL), item.selection.local)
        found = [frontend for view in by_policy.values() for frontend in view.frontends]
        assert len(set(found)) == len(found)
        assert addresses(item.port) == {
            ("node" if f.kind is FrontendKind.NODE_PORT else f.address, f.port) for f in found
        }
        rejections = [view.verdict for view in by_policy.values() if view.verdict is not PacketVerdict.DNAT]
        assert rejections in (
            [],
            [PacketVerdict.DROP] if item.selection.any_usable else [PacketVerdict.REJECT],
        )
        if by_policy.get(Policy.CLUSTER) and item.selection.cluster:
            assert by_policy[Policy.CLUSTER].affinity_seconds == item.port.affinity_seconds


def check_endpoints(view: ServiceView | None, backends: tuple[ResolvedEndpoint, ...]) -> None:
    assert (targets(view) if view else set()) == {backend.target for backend in backends}
    for endpoint in view.endpoints if view else ():
        assert endpoint.share == pytest.approx(1 / len(backends), abs=1e-8)


def test_kinds_of_addresses_are_recognized() -> None:
    ruleset = expected(load_case("lb-source-ranges"), Family.IPV4)
    (view,) = (view for view in views(ruleset, {}) if view.name.service == "web")
    kinds = [FrontendKind.CLUSTER_IP, FrontendKind.LOAD_BALANCER_IP, FrontendKind.NODE_PORT]
    assert [frontend.kind for frontend in view.frontends] == kinds
    assert view.source_ranges == ("203.0.113.0/28", "192.0.2.0/24")


def test_the_load_balancer_ip_is_no_source_range() -> None:
    """The node itself may reach the load balancer IP by a rule of its own."""
    ruleset = expected(load_case("lb-source-ranges"), Family.IPV4)
    filtering = ChainKey("nat", "KUBE-FW-4LVCYZMTA5CQO6SX")
    own = (
        '-s 198.51.100.5/32 -m comment --comment "ns1/web:http loadbalancer IP" -j KUBE-EXT-4LVCYZMTA5CQO6SX'
    )
    chains = {**ruleset.chains, filtering: (own, *ruleset.chains[filtering])}
    (view,) = (view for view in views(Ruleset(Family.IPV4, chains), {}) if view.name.service == "web")
    assert view.source_ranges == ("203.0.113.0/28", "192.0.2.0/24")


def test_a_dropped_node_port_is_shown_once() -> None:
    """Also if it is served at one address only."""
    ruleset = expected(load_case("lb-local-none"), Family.IPV4)
    services = ChainKey("nat", "KUBE-SERVICES")
    jumps = tuple(
        rule.replace("-m addrtype --dst-type LOCAL -j", "-j").replace(
            "-m comment", "-d 192.168.99.10/32 -m comment", 1
        )
        if rule.endswith("-j KUBE-NODEPORTS")
        else rule
        for rule in ruleset.chains[services]
    )
    found = views(Ruleset(Family.IPV4, {**ruleset.chains, services: jumps}), {})
    (view,) = (view for view in found if view.policy is Policy.LOCAL)
    assert view.verdict is PacketVerdict.DROP
    assert [frontend.address for frontend in view.frontends] == ["198.51.100.5", "192.168.99.10"]
