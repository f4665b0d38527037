"""Services in the rules of nftables mode are those in the rules of iptables mode, but for what rules do not show."""

import msgspec
import pytest

from pykubeproxy.inspect.dump.model import ServiceView, node_views
from pykubeproxy.inspect.dump.render_rules import node_listing
from pykubeproxy.inspect.node import NodeRules
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.inspect.targets import ServiceFilter
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.ports import ANY_LOCAL, Frontend, FrontendKind
from tests.cases import NAMES, expected, load_case, nft_tables


def rules_of(name: str, family: Family) -> NodeRules:
    return NodeRules(Ruleset(family, {}), nftables=nft_tables(name, family))


def comparable(view: ServiceView) -> ServiceView:
    """Return what both modes show."""
    endpoints = tuple(
        sorted(
            (
                msgspec.structs.replace(endpoint, chain="", share=round(endpoint.share, 5))
                for endpoint in view.endpoints
            ),
            key=lambda endpoint: endpoint.address,
        )
    )
    return msgspec.structs.replace(
        view,
        frontends=shown(view.frontends),
        from_this_node=shown(view.from_this_node),
        endpoints=endpoints,
        source_ranges=tuple(sorted(view.source_ranges)) if view.source_ranges else None,
        health_check_node_port=None,
        chain=None,
    )


def shown(frontends: tuple[Frontend, ...]) -> tuple[Frontend, ...]:
    """External IPs look like load balancer IPs, and node ports are at some addresses or at all."""
    found = set()
    for frontend in frontends:
        if frontend.kind is FrontendKind.NODE_PORT:
            found.add(Frontend(FrontendKind.NODE_PORT, ANY_LOCAL, frontend.port))
        elif frontend.kind is FrontendKind.LOAD_BALANCER_IP:
            found.add(Frontend(FrontendKind.EXTERNAL_IP, frontend.address, frontend.port))
        else:
            found.add(frontend)
    return tuple(sorted(found, key=str))


@pytest.mark.parametrize("name", NAMES)
def test_views_are_those_of_iptables_mode(name: str) -> None:
    for family in Family:
        rules = rules_of(name, family)
        if rules.in_nftables_mode:
            iptables = node_views(NodeRules(expected(load_case(name), family)))
            assert list(map(comparable, node_views(rules))) == list(map(comparable, iptables))


def test_a_filter_and_the_rules_of_a_service() -> None:
    rules = rules_of("lb-source-ranges", Family.IPV4)
    (view,) = node_views(rules, ServiceFilter("ns1", "web"))
    assert view.verdict is PacketVerdict.DNAT
    assert view.source_ranges == ("192.0.2.0/24", "203.0.113.0/28")
    listing = node_listing(rules, ServiceFilter("ns1", "web"))
    assert "ip kube-proxy firewall-DK7ABAZC-ns1/web/tcp/http: ip saddr != { 192.0.2.0/24" in listing
    assert "default/kubernetes" not in listing
