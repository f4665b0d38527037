"""Differences between two rulesets: as sentences, as a unified diff and as JSON."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import click
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.config import load
from pykubeproxy.inspect.diff.by_rules import RuleChanges, compare_rules, rules_difference, unified
from pykubeproxy.inspect.diff.report import diff_report, rules_result
from pykubeproxy.inspect.node import NodeState, Origin
from pykubeproxy.objects import EndpointSlice, Family, Node, Port, Protocol, Service, Updated
from pykubeproxy.report.text import text as report_text
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.difference import own_part
from pykubeproxy.rules.render import installed, render
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.cluster import Cluster
from tests import strategies
from tests.objects import endpoint, service, slice_of

Objects = Iterable[Service | EndpointSlice]
HERE, THERE = {"node_name": "node1"}, {"node_name": "node2"}


def rules(objects: Objects, family: Family = Family.IPV4, **flags: str) -> Ruleset:
    """Return the tables of node1 with only the rules for these objects."""
    cluster = Cluster()
    for it in objects:
        cluster.apply(Updated(it))
    config = load(
        None, {"cluster-cidr": "10.244.0.0/16", **{k.replace("_", "-"): v for k, v in flags.items()}}
    )
    rules_context = rule_context(
        config.config, "node1", Node("node1", ("192.168.99.10",)), KernelFacts(), family
    )
    return installed(render(cluster, rules_context), rules_context.options)


def text_of(changes: Sequence[RuleChanges]) -> str:
    result = rules_result(NodeState(Node("node1"), Origin("a.yaml")), changes, "a.yaml", "b.yaml")
    return click.unstyle(report_text(diff_report([result]).blocks(wide=False)))


def sentences_between(before: Ruleset, after: Ruleset) -> list[str]:
    return [*compare_rules(before, after).messages]


def web(*endpoints: str, **fields: Any) -> list[Service | EndpointSlice]:
    """Return the Service ns/web with endpoints on this node."""
    return [service(**fields), slice_of(*(endpoint(it, **HERE) for it in endpoints))]


BALANCED = {"type": "LoadBalancer", "load_balancer_ips": ("198.51.100.5",)}
NODE_PORT = {"type": "NodePort", "ports": (Port("http", Protocol.TCP, 80, 30080),)}
UDP: dict[str, Any] = {"ports": (Port("dns", Protocol.UDP, 53),)}

CHANGES: dict[str, tuple[Objects, Objects, list[str]]] = {
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


@pytest.mark.parametrize("name", CHANGES)
def test_each_kind_of_change_has_one_sentence(name: str) -> None:
    before, after, sentences = CHANGES[name]
    assert sentences_between(rules(before), rules(after)) == sentences


def test_policy_local_without_local_endpoints_is_dropped() -> None:
    """Policy Cluster only loses the endpoint."""
    fields: dict[str, Any] = {**NODE_PORT, "external_local": True}
    local, remote = endpoint("10.244.1.5", **HERE), endpoint("10.244.2.6", **THERE)
    assert sentences_between(
        rules([service(**fields), slice_of(local, remote)]), rules([service(**fields), slice_of(remote)])
    ) == [
        "ns/web:http (policy Cluster): 1 endpoint removed: 10.244.1.5:8080; share of the others 50% → 100%",
        "ns/web:http (policy Local): 1 endpoint removed: 10.244.1.5:8080; dropped: no endpoints on this node",
    ]


def test_changed_settings_name_the_shared_chains() -> None:
    """Services that keep their endpoints are summarized; a cluster CIDR decides what is masqueraded."""
    objects = web("10.244.1.5")
    assert sentences_between(rules(objects), rules(objects, cluster_cidr="10.0.0.0/8")) == [
        "ns/web:http: different rules for the same endpoints"
    ]
    assert sentences_between(rules(objects), rules(objects, iptables_masquerade_bit="15")) == [
        "table filter, KUBE-FORWARD: 1 rule removed, 1 rule added",
        "table nat, KUBE-POSTROUTING: 2 rules removed, 2 rules added",
        "table nat, KUBE-MARK-MASQ: 1 rule removed, 1 rule added",
    ]


def live_and_desired(
    changed: dict[ChainKey, tuple[str, ...] | None], objects: Objects
) -> tuple[Ruleset, Ruleset]:
    """Return desired tables with some chains changed or removed, and the desired tables."""
    desired = rules(objects)
    chains = {**desired.chains, **changed}
    chains_left = {key: rules_ for key, rules_ in chains.items() if rules_ is not None}
    return own_part(Ruleset(Family.IPV4, chains_left), desired), desired


def test_wide_counts_the_rules_of_each_chain() -> None:
    changes = [compare_rules(rules(web("10.244.1.5")), rules(web("10.244.1.6")))]
    result = rules_result(NodeState(Node("node1"), Origin("a.yaml")), changes, "a.yaml", "b.yaml")
    wide = click.unstyle(report_text(diff_report([result]).blocks(wide=True)))
    rows = [line.split() for line in wide.splitlines()]
    assert rows[1] == ["node1", "differs", "1"]
    start = rows.index(["FAMILY", "TABLE", "CHAIN", "CHANGE", "REMOVED", "ADDED"])
    assert [(row[1], row[2][:9], *row[3:]) for row in rows[start + 1 :]] == [
        ("nat", "KUBE-SVC-", "changed", "1", "1"),
        ("nat", "KUBE-SEP-", "added", "0", "2"),
        ("nat", "KUBE-SEP-", "removed", "2", "0"),
    ]
    assert set(text_of(changes).splitlines()) <= set(wide.splitlines())


def test_drift_names_the_table() -> None:
    objects = web("10.244.1.5")
    prerouting, canary = ChainKey("nat", "PREROUTING"), ChainKey("mangle", "KUBE-PROXY-CANARY")
    services = skeleton.NAT_SERVICES
    assert sentences_between(*live_and_desired({prerouting: (), canary: None}, objects)) == [
        "table nat: 1 jump added: PREROUTING to KUBE-SERVICES",
        "table mangle: 1 chain added: KUBE-PROXY-CANARY",
    ]
    desired = rules(objects).chains[services]
    assert sentences_between(*live_and_desired({services: tuple(reversed(desired))}, objects)) == [
        "table nat, KUBE-SERVICES: the same rules in another order"
    ]
    assert sentences_between(*live_and_desired({services: (*desired, "-j ACCEPT")}, objects)) == [
        "table nat, KUBE-SERVICES: 1 rule removed"
    ]
    assert sentences_between(*live_and_desired({services: desired[1:]}, objects)) == [
        "ns/web:http added: cluster IP 10.96.0.10:80; 1 endpoint: 10.244.1.5:8080"
    ]
    assert sentences_between(*live_and_desired({ChainKey("nat", "KUBE-SEP-X"): ("-j ACCEPT",)}, objects)) == [
        "1 unreferenced chain removed: KUBE-SEP-X"
    ]


def test_a_changed_endpoint_chain_names_its_service() -> None:
    desired = rules(web("10.244.1.5"))
    (chain,) = (key for key in desired.chains if key.chain.startswith("KUBE-SEP-"))
    dnat = desired.chains[chain][1].replace("10.244.1.5:8080", "10.244.1.9:8080")
    before, after = live_and_desired({chain: (desired.chains[chain][0], dnat)}, web("10.244.1.5"))
    assert sentences_between(before, after) == [
        "ns/web:http: 1 endpoint removed: 10.244.1.9:8080; 1 endpoint added: 10.244.1.5:8080"
    ]


def test_dispatch_branches_are_distinct_from_services() -> None:
    desired = rules(web("10.244.1.5"))
    services, branch = skeleton.NAT_SERVICES, ChainKey("nat", "KUBE-SVC-BRANCH")
    rule, *rest = desired.chains[services]
    chains = {**desired.chains, services: ("-d 10.96.0.0/16 -j KUBE-SVC-BRANCH", *rest), branch: (rule,)}
    assert sentences_between(
        Ruleset(Family.IPV4, chains), Ruleset(Family.IPV4, {**chains, branch: (rule, "-j RETURN")})
    ) == ["1 chain of the dispatch tree: different rules"]


def test_services_with_the_same_rules_in_a_tree_are_not_named() -> None:
    """kube-proxy's flat chain and a dispatch tree differ, but no service does, except one with another endpoint."""
    many = [service(f"s{i}", cluster_ip=f"10.96.{i // 250}.{i % 250}") for i in range(400)]
    pods = [slice_of(f"10.244.{i // 250}.{i % 250}", service=f"s{i}") for i in range(400)]
    flat, tree = (rules([*many, *pods], dispatch=dispatch) for dispatch in ("flat", "tree"))
    sentences = sentences_between(flat, tree)
    assert not any("ns/s" in it for it in sentences), sentences
    assert any("of the dispatch tree: different rules" in it for it in sentences)
    other = rules([*many, *pods[:-1], slice_of("10.244.9.9", service="s399")], dispatch="tree")
    assert [it for it in sentences_between(flat, other) if "ns/s" in it] == [
        "ns/s399:http: 1 endpoint removed: 10.244.1.149:8080; 1 endpoint added: 10.244.9.9:8080"
    ]


def test_only_changed_services_are_named() -> None:
    """Also among hundreds of services and with dispatch branches."""
    services_ = [service(f"s{i}", cluster_ip=f"10.96.{i // 250}.{i % 250}") for i in range(400)]
    new = service("zz", cluster_ip="10.96.0.251")
    assert sentences_between(rules(services_), rules([*services_, new])) == [
        "ns/zz:http added: cluster IP 10.96.0.251:80; rejected: no endpoints"
    ]
    with_endpoint: list[Service | EndpointSlice] = [*services_, slice_of("10.244.1.5", service="s7")]
    assert sentences_between(rules(services_), rules(with_endpoint)) == [
        "ns/s7:http: 1 endpoint added: 10.244.1.5:8080; no longer rejected"
    ]


def test_empty_tables_are_one_sentence() -> None:
    before, after = own_part(Ruleset(Family.IPV4, {}), rules([])), rules([])
    assert sentences_between(before, after) == [
        "all jumps and shared chains added: the tables have no rules of a service proxy",
        "table filter: 1 chain added: KUBE-FIREWALL",
    ]


def test_text_has_80_columns_and_a_headline_per_family() -> None:
    """Families without a difference are left out."""
    changes = [
        compare_rules(rules([]), rules(CHANGES["many endpoints"][1])),
        compare_rules(*[rules([], Family.IPV6)] * 2),
    ]
    text = text_of(changes)
    assert text.splitlines()[0] == "IPv4: a.yaml → b.yaml"
    assert "IPv6" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert text_of([changes[1]]) == unified([changes[1]], "a", "b") == ""


def test_unified_diff_names_the_chain_of_each_hunk() -> None:
    before, after, _ = CHANGES["one endpoint gone"]
    lines = click.unstyle(unified([compare_rules(rules(before), rules(after))], "a", "b")).splitlines()
    assert lines[:3] == ["--- a, IPv4", "+++ b, IPv4", "@@ -1,4 +1,3 @@ nat KUBE-SVC-HMALVVKA6APKJPPY"]
    assert lines[3].startswith(" ! -s 10.244.0.0/16 -d 10.96.0.10/32 ")
    assert lines[-3].startswith("@@ -1,2 +0,0 @@ nat KUBE-SEP-")
    assert lines[-3].endswith(" (removed)")
    added, removed = ({line[1:] for line in lines[2:] if line[0] == sign} for sign in "+-")
    old, new = ({rule for it in rules(each).chains.values() for rule in it} for each in (before, after))
    assert (removed, added) == (old - new, new - old)


def test_json_has_endpoints_shares_rules_and_messages() -> None:
    before, after, sentences = CHANGES["one endpoint gone"]
    changes: Any = msgspec.to_builtins(rules_difference([compare_rules(rules(before), rules(after))]))
    assert changes["messages"] == tuple(sentences)
    (service_,) = changes["ports"]
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
    assert policy["endpointsRemoved"] == (
        {"address": "10.244.1.5", "port": 8080, "share": pytest.approx(1 / 3)},
    )
    assert [it["after"] for it in policy["sharesChanged"]] == [0.5, 0.5]
    states = [
        (it["chain"][:9], it["change"], len(it["removed"]), len(it["added"])) for it in changes["chains"]
    ]
    assert states == [("KUBE-SVC-", "changed", 1, 0), ("KUBE-SEP-", "removed", 2, 0)]
    same = rules_difference([compare_rules(rules(after), rules(after))])
    assert (same.ports, same.chains, same.messages) == ((), (), ())


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_difference_has_a_true_sentence(data: st.DataObject) -> None:
    """Equal rulesets have none."""
    before, after = (rules(_objects(data)) for _ in range(2))
    changes = compare_rules(before, after)
    sentences = changes.messages
    assert bool(sentences) == bool(changes.chains) == (before != after)
    _assert_changes_turn_before_into_after(changes, before, after)
    for sentence in sentences:
        for target in re.findall(r"endpoints? added: (10[0-9.:]*)", sentence):
            assert any(f"--to-destination {target}" in rule for it in after.chains.values() for rule in it)


def _objects(data: st.DataObject) -> Objects:
    cluster = data.draw(st.lists(strategies.services(), unique_by=lambda it: it.name, max_size=2))
    slices = data.draw(st.lists(strategies.slices(), unique_by=lambda it: it.name, max_size=2))
    return [*cluster, *slices]


def _assert_changes_turn_before_into_after(changes: RuleChanges, before: Ruleset, after: Ruleset) -> None:
    chains = dict(before.chains)
    for it in changes.chains:
        chains.pop(it.key, None)
        if it.after is not None:
            chains[it.key] = it.after
    assert chains == after.chains
