"""dump-rules shows the same for tree and flat dispatch."""

import msgspec
import pytest
from hypothesis import given, settings

from pykubeproxy.config import Dispatch
from pykubeproxy.inspect.dump.model import ServiceView, views
from pykubeproxy.inspect.dump.render_rules import listing
from pykubeproxy.inspect.routes import serving_rules
from pykubeproxy.inspect.targets import ServiceFilter
from pykubeproxy.objects import Family
from pykubeproxy.rules.dispatch import shared_chain
from pykubeproxy.rules.iptables_save import parse_rule
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.skeleton import NAT_SERVICES
from pykubeproxy.rules.text import rule
from tests.unit.rules.test_packets import World, worlds

pytestmark = pytest.mark.usefixtures("small_trees")


def normalized_views(world: World) -> list[ServiceView]:
    """Return the views without the positions of rules."""

    def plain(view: ServiceView) -> ServiceView:
        endpoints = tuple(sorted(view.endpoints, key=lambda it: (it.address, it.port)))
        rounded = tuple(msgspec.structs.replace(it, share=round(it.share, 6)) for it in endpoints)
        frontends = tuple(sorted(view.frontends, key=str))
        return msgspec.structs.replace(view, frontends=frontends, endpoints=rounded)

    return sorted(
        (plain(view) for view in views(world.rules(), {})), key=lambda it: (it.name, it.policy.value)
    )


@settings(max_examples=50)
@given(worlds)
def test_tree_dispatch_has_the_same_views(world: World) -> None:
    """Services, frontends, endpoints and shares are equal."""
    assert normalized_views(world._replace(dispatch="tree")) == normalized_views(
        world._replace(dispatch="flat")
    )


def filter_rules(world: World) -> set[str]:
    """Return the rules of services in table filter that `dump-rules -o rules` lists, without their chains."""
    _, _, section = listing(world.rules(), ServiceFilter()).partition("*filter\n")
    lines = section.partition("*nat\n")[0].splitlines()
    return {text for _, _, text in (line.split(" ", 2) for line in lines) if parse_rule(text).title}


@settings(max_examples=50)
@given(worlds)
def test_tree_dispatch_lists_the_same_rules_of_table_filter(world: World) -> None:
    assert filter_rules(world._replace(dispatch="tree")) == filter_rules(world._replace(dispatch="flat"))


def test_a_port_that_two_services_claim_has_no_frontend_of_its_own() -> None:
    """In the tree of an address with many ports, the rules of such a port are in a chain of their own."""
    claims = tuple(
        rule(
            f"-m tcp --dport {port}",
            destination="192.0.2.9/32",
            protocol="tcp",
            comment=f"ns/s{copy}:p{port} external IP",
            target=f"KUBE-EXT-{copy}",
        )
        for port in range(1, 200)
        for copy in range(2)
    )
    tree = shared_chain(NAT_SERVICES, [((NAT_SERVICES, claims),)], (), Dispatch.TREE)
    chains = {ChainKey("nat", name): rules for name, rules in tree.chains}
    targets = {ChainKey("nat", f"KUBE-EXT-{copy}"): () for copy in range(2)}
    found = serving_rules(Ruleset(Family.IPV4, {**chains, **targets, NAT_SERVICES: tree.root}))
    assert sorted((it.title, it.frontend.port) for it in found) == sorted(
        (f"ns/s{copy}:p{port}", port) for port in range(1, 200) for copy in range(2)
    )
