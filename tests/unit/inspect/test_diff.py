"""What differs between two sets of rules: in words, as a unified diff, and for programs."""

import re
from collections.abc import Iterable

import click
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.config import Dispatch, load
from pykubeproxy.inspect.diff.model import Changes, compare
from pykubeproxy.inspect.diff.render_json import document
from pykubeproxy.inspect.diff.render_text import sentences as sentences_of
from pykubeproxy.inspect.diff.render_text import text as text_of
from pykubeproxy.inspect.diff.render_text import unified
from pykubeproxy.kernel.iptables import canonical
from pykubeproxy.objects import EndpointSlice, Family, Node, Port, Protocol, Service, Updated
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.difference import installed, own_part
from pykubeproxy.rules.render import render
from pykubeproxy.rules.ruleset import ChainKey, Ruleset, parse
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.wording import TIE
from tests import strategies
from tests.cases import ADDRESSES, NAMES, cluster_of, config_of, load_case, node_of
from tests.objects import endpoint, service, slice_of

Objects = Iterable[Service | EndpointSlice]
HERE, THERE = {"node_name": "node1"}, {"node_name": "node2"}


def rules(objects: Objects, family: Family = Family.IPV4, **flags: str) -> Ruleset:
    """The tables of node1 with nothing but the rules for these objects."""
    cluster = Cluster()
    for it in objects:
        cluster.apply(Updated(it))
    config = load(
        None, {"cluster-cidr": "10.244.0.0/16", **{k.replace("_", "-"): v for k, v in flags.items()}}
    )
    on = rule_context(config.config, "node1", Node("node1", ("192.168.99.10",)), KernelFacts(), family)
    return installed(render(cluster, on), on.options)


def said(before: Ruleset, after: Ruleset) -> list[str]:
    return [it.replace(TIE, " ") for it in sentences_of(compare(before, after))]


def web(*endpoints: str, **fields: object) -> list[Service | EndpointSlice]:
    """The Service ns/web with endpoints at these addresses; ports of the node are 300xx."""
    return [service(**fields), slice_of(*(endpoint(it, **HERE) for it in endpoints))]


BALANCED = {"type": "LoadBalancer", "load_balancer_ips": ("198.51.100.5",)}
NODE_PORT = {"type": "NodePort", "ports": (Port("http", Protocol.TCP, 80, 30080),)}
UDP = {"ports": (Port("dns", Protocol.UDP, 53),)}

WORDS: dict[str, tuple[Objects, Objects, list[str]]] = {
    "one endpoint gone": (
        web("10.244.1.5", "10.244.1.6", "10.244.1.7"),
        web("10.244.1.6", "10.244.1.7"),
        ["ns/web:http: 1 endpoint removed: 10.244.1.5:8080; share of the others 33.3% → 50%"],
    ),
    "endpoints replaced": (
        web("10.244.1.5", "10.244.1.6"),
        web("10.244.1.7", "10.244.1.8"),
        [
            (
                "ns/web:http: 2 endpoints removed: 10.244.1.5:8080 and 10.244.1.6:8080;"
                " 2 endpoints added: 10.244.1.7:8080 and 10.244.1.8:8080"
            )
        ],
    ),
    "many endpoints": (
        web("10.244.1.1"),
        web(*(f"10.244.1.{i}" for i in range(1, 9))),
        [
            (
                "ns/web:http: 7 endpoints added: 10.244.1.2:8080, 10.244.1.3:8080, 10.244.1.4:8080,"
                " 10.244.1.5:8080, 10.244.1.6:8080 and 2 more; share of the others 100% → 12.5%"
            )
        ],
    ),
    "last endpoint gone": (
        web("10.244.1.5"),
        web(),
        ["ns/web:http: 1 endpoint removed: 10.244.1.5:8080; rejected: no endpoints"],
    ),
    "first endpoint": (
        web(),
        web("10.244.1.5"),
        ["ns/web:http: 1 endpoint added: 10.244.1.5:8080; no longer rejected"],
    ),
    "new service": (
        [],
        web("10.244.1.5"),
        ["ns/web:http added: cluster IP 10.96.0.10:80; 1 endpoint: 10.244.1.5:8080"],
    ),
    "service gone": (
        web(),
        [],
        ["ns/web:http removed: cluster IP 10.96.0.10:80; rejected: no endpoints"],
    ),
    "another cluster IP": (
        web("10.244.1.5"),
        web("10.244.1.5", cluster_ip="10.96.0.11"),
        ["ns/web:http: cluster IP 10.96.0.10:80 removed; cluster IP 10.96.0.11:80 added"],
    ),
    "node port": (
        web("10.244.1.5"),
        web("10.244.1.5", **NODE_PORT),
        ["ns/web:http: node port 30080 added"],
    ),
    "external policy Local": (
        web("10.244.1.5", **NODE_PORT),
        web("10.244.1.5", **NODE_PORT, external_local=True),
        [
            "ns/web:http (policy Cluster): node port 30080 removed; node port 30080 added for this node and its pods",
            "ns/web:http (policy Local): added; node port 30080; 1 endpoint: 10.244.1.5:8080",
        ],
    ),
    "affinity": (
        web("10.244.1.5"),
        web("10.244.1.5", affinity_seconds=10800),
        ["ns/web:http: session affinity none → 3 h"],
    ),
    "source ranges": (
        web("10.244.1.5", **BALANCED),
        web("10.244.1.5", **BALANCED, source_ranges=("203.0.113.0/24",)),
        ["ns/web:http: load balancer open to all → 203.0.113.0/24"],
    ),
    "health check": (
        web("10.244.1.5", **BALANCED, external_local=True, health_check_node_port=32000),
        web("10.244.1.5", **BALANCED, external_local=True, health_check_node_port=32001),
        ["ns/web:http (policy Local): health check node port 32000 → 32001"],
    ),
    "udp": (
        [service(**UDP)],
        [service(**UDP, cluster_ip="10.96.0.53")],
        ["ns/web:dns UDP: cluster IP 10.96.0.10:53 removed; cluster IP 10.96.0.53:53 added"],
    ),
    "one of two": (
        [*web("10.244.1.5"), service("b", cluster_ip="10.96.0.11")],
        [*web("10.244.1.5"), service("b", cluster_ip="10.96.0.11"), slice_of("10.244.1.9", service="b")],
        ["ns/b:http: 1 endpoint added: 10.244.1.9:8080; no longer rejected"],
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_words(name: str) -> None:
    """Each kind of change has its sentence, and nothing else is said."""
    before, after, sentences = WORDS[name]
    assert said(rules(before), rules(after)) == sentences


def test_other_endpoints_under_local() -> None:
    """What a policy Local loses with its last endpoint of this node is dropped from then on."""
    fields = {**NODE_PORT, "external_local": True}
    one, two = endpoint("10.244.1.5", **HERE), endpoint("10.244.2.6", **THERE)
    assert said(
        rules([service(**fields), slice_of(one, two)]), rules([service(**fields), slice_of(two)])
    ) == [
        "ns/web:http (policy Cluster): 1 endpoint removed: 10.244.1.5:8080; share of the others 50% → 100%",
        "ns/web:http (policy Local): 1 endpoint removed: 10.244.1.5:8080; dropped: no endpoints on this node",
    ]


def test_configurations() -> None:
    """Rules that lead to the same endpoints are said to; the chains that services share are named."""
    objects = web("10.244.1.5")
    assert said(rules(objects), rules(objects, cluster_cidr="10.0.0.0/8")) == [
        "ns/web:http: other rules with the same effect"
    ]
    assert said(rules(objects), rules(objects, iptables_masquerade_bit="15")) == [
        "table filter, KUBE-FORWARD: 1 rule removed, 1 rule added",
        "table nat, KUBE-POSTROUTING: 2 rules removed, 2 rules added",
        "table nat, KUBE-MARK-MASQ: 1 rule removed, 1 rule added",
    ]


def live(changed: dict[ChainKey, tuple[str, ...] | None], objects: Objects) -> tuple[Ruleset, Ruleset]:
    """Tables that were as they should be until some chains were changed, or taken out, and how they should be."""
    wanted = rules(objects)
    chains = {**wanted.chains, **changed}
    there = {key: rules_ for key, rules_ in chains.items() if rules_ is not None}
    return own_part(Ruleset(Family.IPV4, there), wanted), wanted


def test_drift() -> None:
    """What somebody took out or put in is named with its table."""
    objects = web("10.244.1.5")
    prerouting, canary = ChainKey("nat", "PREROUTING"), ChainKey("mangle", "KUBE-PROXY-CANARY")
    services = skeleton.NAT_SERVICES
    assert said(*live({prerouting: (), canary: None}, objects)) == [
        "table nat: 1 jump added: PREROUTING to KUBE-SERVICES",
        "table mangle: 1 chain added: KUBE-PROXY-CANARY",
    ]
    wanted = rules(objects).chains[services]
    assert said(*live({services: tuple(reversed(wanted))}, objects)) == [
        "table nat, KUBE-SERVICES: the same rules in another order"
    ]
    assert said(*live({services: (*wanted, "-j ACCEPT")}, objects)) == [
        "table nat, KUBE-SERVICES: 1 rule removed"
    ]
    assert said(*live({services: wanted[1:]}, objects)) == [
        "ns/web:http added: cluster IP 10.96.0.10:80; 1 endpoint: 10.244.1.5:8080"
    ]
    assert said(*live({ChainKey("nat", "KUBE-SEP-X"): ("-j ACCEPT",)}, objects)) == [
        "1 unreferenced chain removed: KUBE-SEP-X"
    ]


def test_endpoints_own_chain() -> None:
    """A change in an endpoint's own chain is put down to the service that leads there."""
    wanted = rules(web("10.244.1.5"))
    (chain,) = (key for key in wanted.chains if key.chain.startswith("KUBE-SEP-"))
    dnat = wanted.chains[chain][1].replace("10.244.1.5:8080", "10.244.1.9:8080")
    before, after = live({chain: (wanted.chains[chain][0], dnat)}, web("10.244.1.5"))
    assert said(before, after) == [
        "ns/web:http: 1 endpoint removed: 10.244.1.9:8080; 1 endpoint added: 10.244.1.5:8080"
    ]


def test_branches() -> None:
    """Chains that only branch on the way to services are told from those of services."""
    wanted = rules(web("10.244.1.5"))
    services, branch = skeleton.NAT_SERVICES, ChainKey("nat", "KUBE-SVC-BRANCH")
    rule, *rest = wanted.chains[services]
    chains = {**wanted.chains, services: ("-d 10.96.0.0/16 -j KUBE-SVC-BRANCH", *rest), branch: (rule,)}
    assert said(
        Ruleset(Family.IPV4, chains), Ruleset(Family.IPV4, {**chains, branch: (rule, "-j RETURN")})
    ) == ["1 chain of the dispatch tree: other rules"]


def test_many_services() -> None:
    """However many services there are, and however the way to them branches, only those that change are named."""
    many = [service(f"s{i}", cluster_ip=f"10.96.{i // 250}.{i % 250}") for i in range(400)]
    new = service("zz", cluster_ip="10.96.0.251")
    assert said(rules(many), rules([*many, new])) == [
        "ns/zz:http added: cluster IP 10.96.0.251:80; rejected: no endpoints"
    ]
    served = [*many, slice_of("10.244.1.5", service="s7")]
    assert said(rules(many), rules(served)) == [
        "ns/s7:http: 1 endpoint added: 10.244.1.5:8080; no longer rejected"
    ]


def test_nothing_there_yet() -> None:
    """Before a proxy has written anything one sentence says so instead of forty."""
    before, after = own_part(Ruleset(Family.IPV4, {}), rules([])), rules([])
    assert said(before, after) == [
        "all jumps and shared chains added: the tables have no rules of a service proxy",
        "table filter: 1 chain added: KUBE-FIREWALL",
    ]


def test_text() -> None:
    """Words keep to 80 columns, a headline for each family that differs; unchanged families say nothing."""
    found = [compare(rules([]), rules(WORDS["many endpoints"][1])), compare(*[rules([], Family.IPV6)] * 2)]
    text = click.unstyle(text_of(found, "a.yaml", "b.yaml"))
    assert text.splitlines()[0] == "IPv4: a.yaml → b.yaml"
    assert "IPv6" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert text_of([found[1]], "a", "b") == unified([found[1]], "a", "b") == ""


def test_unified() -> None:
    """The diff names the chain of each piece, with some rules that stay around those that change."""
    before, after, _ = WORDS["one endpoint gone"]
    lines = click.unstyle(unified([compare(rules(before), rules(after))], "a", "b")).splitlines()
    assert lines[:3] == ["--- a, IPv4", "+++ b, IPv4", "@@ -1,4 +1,3 @@ nat KUBE-SVC-HMALVVKA6APKJPPY"]
    assert lines[3].startswith(" ! -s 10.244.0.0/16 -d 10.96.0.10/32 ")
    assert lines[-3].startswith("@@ -1,2 +0,0 @@ nat KUBE-SEP-")
    assert lines[-3].endswith(" (removed)")
    added, removed = ({line[1:] for line in lines[2:] if line[0] == sign} for sign in "+-")
    old, new = ({rule for it in rules(each).chains.values() for rule in it} for each in (before, after))
    assert (removed, added) == (old - new, new - old)


def test_document() -> None:
    """The document has the endpoints, the shares, the chains' rules and the words."""
    before, after, sentences = WORDS["one endpoint gone"]
    found = document([compare(rules(before), rules(after))], "a", "b")
    assert {key: found[key] for key in ("apiVersion", "before", "after", "different")} == {
        "apiVersion": "pykubeproxy/v1",
        "before": "a",
        "after": "b",
        "different": True,
    }
    assert found["messages"] == sentences
    (service_,) = found["services"]  # type: ignore[misc]
    (policy,) = service_["policies"]
    assert (
        service_["namespace"],
        service_["name"],
        service_["port"],
        service_["change"],
        service_["family"],
    ) == (
        "ns",
        "web",
        "http",
        "changed",
        "IPv4",
    )
    assert policy["endpointsRemoved"] == [
        {"address": "10.244.1.5", "port": 8080, "share": pytest.approx(1 / 3)}
    ]
    assert [it["after"] for it in policy["sharesChanged"]] == [0.5, 0.5]
    states = [(it["chain"][:9], it["change"], len(it["removed"]), len(it["added"])) for it in found["chains"]]  # type: ignore[attr-defined]
    assert states == [("KUBE-SVC-", "changed", 1, 0), ("KUBE-SEP-", "removed", 2, 0)]
    same = document([compare(rules(after), rules(after))], "b", "b")
    assert (same["different"], same["services"], same["chains"], same["messages"]) == (False, [], [], [])


@pytest.mark.parametrize("name", NAMES)
def test_kube_proxys_rules(name: str) -> None:
    """Against the tables that kube-proxy left, nothing differs but the order of services in the chains they share."""
    case = load_case(name)
    node = node_of(case)
    for family in Family:
        on = rule_context(config_of(case), node.name, node, KernelFacts(addresses=ADDRESSES), family)
        on = msgspec.structs.replace(on, options=msgspec.structs.replace(on.options, dispatch=Dispatch.FLAT))
        wanted = installed(render(cluster_of(case), on), on.options)
        left = parse(family, canonical("\n".join(case["expected"][family.value.lower()])))
        # Table mangle has not been recorded.
        left = Ruleset(family, {**left.chains, ChainKey("mangle", "KUBE-PROXY-CANARY"): ()})
        sentences = said(own_part(left, wanted), wanted)
        assert all(it.endswith("the same rules in another order") for it in sentences), sentences


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_difference_is_said(data: st.DataObject) -> None:
    """Whatever changes, there are words for it; if nothing does there are none; and every line of them is true."""
    before, after = (rules(_objects(data)) for _ in range(2))
    found = compare(before, after)
    sentences = list(sentences_of(found))
    assert bool(sentences) == bool(found.chains) == (before != after)
    _follows(found, before, after)
    for sentence in sentences:
        for target in re.findall(r"endpoints? added: (10[0-9.:]*)", sentence):
            assert any(f"--to-destination {target}" in rule for it in after.chains.values() for rule in it)


def _objects(data: st.DataObject) -> Objects:
    cluster = data.draw(st.lists(strategies.services(), unique_by=lambda it: it.name, max_size=2))
    slices = data.draw(st.lists(strategies.slices(), unique_by=lambda it: it.name, max_size=2))
    return [*cluster, *slices]


def _follows(found: Changes, before: Ruleset, after: Ruleset) -> None:
    """The chains that differ make the one of the other."""
    chains = dict(before.chains)
    for it in found.chains:
        chains.pop(it.key, None)
        if it.after is not None:
            chains[it.key] = it.after
    assert chains == after.chains
