"""Compare the rules of many nodes with the objects: which Services are wrong where, without false alarms."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from itertools import product
from typing import Any

import click
import msgspec
import pytest

from pykubeproxy.config.table import HEALTH_PORT
from pykubeproxy.inspect.diff.comparison import NodeComparison
from pykubeproxy.inspect.diff.desired import DesiredRules
from pykubeproxy.inspect.diff.report import MeaningDifference, NodeResult, NodeVerdict, diff_report
from pykubeproxy.inspect.diff.rounds import Clock, compare_nodes
from pykubeproxy.inspect.meaning import comparison as meaning
from pykubeproxy.inspect.meaning.fingerprints import SharedNumbers
from pykubeproxy.inspect.node import NodeState, UnknownNode
from pykubeproxy.objects import (
    Endpoint,
    EndpointPort,
    EndpointSlice,
    Family,
    Key,
    Kind,
    Listed,
    Node,
    Port,
    Protocol,
    Service,
    Updated,
)
from pykubeproxy.report.document import document, json_text
from pykubeproxy.report.text import text
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.inferred import inferred_settings
from pykubeproxy.rules.options import LocalTraffic
from pykubeproxy.rules.render import assemble, installed
from pykubeproxy.rules.render import render as render_rules
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.save_files import SavedFile, read_saves
from pykubeproxy.rules.service import port_rules, reject_rules
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import Reserved
from pykubeproxy.services.selection import NodeTopology, resolve_ports
from tests.cases import ADDRESSES, NAMES, cluster_of, config_of, load_case, node_of
from tests.fleet import FleetNode, NodeKind, Size, cluster, context, nodes, saved, state_of, tables
from tests.older_forms import Form, rules_in_form

SIZE = Size(nodes=20, services=21)
NOW = 100_000.0
SYNC_PERIOD = 30.0
WRONG = frozenset({3, 4})


@cache
def followed() -> Cluster:
    return cluster(SIZE)


@cache
def stale() -> Cluster:
    return cluster(SIZE, WRONG)


@cache
def read(one: FleetNode, objects: Cluster) -> dict[Family, Ruleset]:
    """Return the tables of a node as the output of iptables-save gives them."""
    files = (SavedFile(family.value, saved(it)) for family, it in tables(one, objects).items())
    return {it.ruleset.family: it.ruleset for it in read_saves(files)}


class Source:
    """Nodes of which some follow the objects of `old`; `reads` are the names of the nodes that were read, in order."""

    def __init__(self, objects: Cluster | None = None, changed_at: float | None = 1000.0) -> None:
        self.cluster = objects or followed()
        self.old: Mapping[str, Cluster] = {
            it.node.name: stale() for it in nodes(SIZE) if it.kind is NodeKind.STALE
        }
        self.reads: list[str] = []
        self.lists = 0
        self.changed_at = changed_at
        self.known = {it.node.name: it for it in nodes(SIZE)}

    def objects(self) -> Cluster:
        self.lists += 1
        return self.cluster

    def nodes(self, wanted: Sequence[Node]) -> Iterator[NodeState | UnknownNode]:
        for node in reversed(wanted):
            self.reads.append(node.name)
            one = self.known[node.name]
            if one.kind is NodeKind.IPVS:
                yield UnknownNode(node, "runs kube-proxy in IPVS mode", by_design=True)
            else:
                objects = self.old.get(node.name, self.cluster)
                yield state_of(
                    node, read(one, objects), f"kube-proxy {one.form.value}", f"kube-system/{node.name}"
                )

    def last_changes(self, services: Sequence[Key]) -> Mapping[Key, float]:
        return dict.fromkeys(services, self.changed_at) if self.changed_at else {}


class Time:
    """A clock that only sleeping advances."""

    def __init__(self, wake: Any = None) -> None:
        self.now = NOW
        self.slept: list[float] = []
        self._wake = wake

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        if self._wake:
            self._wake(len(self.slept))

    def clock(self) -> Clock:
        return Clock(lambda: self.now, self.sleep)


def shown(results: Iterable[NodeResult], *, wide: bool = False) -> str:
    return click.unstyle(text(diff_report(results).blocks(wide=wide)))


def results_of(source: Source, time: Time) -> dict[str, NodeResult]:
    wanted = [it.node for it in nodes(SIZE)]
    return {it.name: it for it in compare_nodes(source, wanted, time.clock(), SYNC_PERIOD)}


@cache
def usual() -> tuple[Source, Time, dict[str, NodeResult]]:
    source, time = Source(), Time()
    return source, time, results_of(source, time)


def test_each_node_gets_its_verdict_whatever_its_version() -> None:
    _, _, results = usual()
    assert len(results) == SIZE.nodes
    expected = {
        NodeKind.FOLLOWS: NodeVerdict.FOLLOWS,
        NodeKind.STALE: NodeVerdict.DIFFERS,
        NodeKind.IPVS: NodeVerdict.NOT_COMPARED,
    }
    for one in nodes(SIZE):
        assert results[one.node.name].verdict is expected[one.kind], results[one.node.name]


def test_a_stale_node_names_its_wrong_services_and_when_they_changed() -> None:
    _, _, results = usual()
    result = results["node3"]
    assert [str(it.key) for it in result.wrong] == ["default/service3", "default/service4"]
    (difference,) = result.wrong[0].differences
    assert difference == MeaningDifference(
        "http", ("10.96.0.4:80",), "", "1 endpoint missing: 10.244.31.5:8080"
    )
    assert result.objects_changed == datetime.fromtimestamp(1000, UTC)
    assert result.proxy == "kube-proxy v1.30.8"


def test_wide_adds_pods_and_settings() -> None:
    _, _, results = usual()
    wide = shown([results["node3"]], wide=True)
    lines = [" ".join(line.split()) for line in wide.splitlines()]
    assert lines[0] == "NODE PROXY VERDICT WRONG OBJECTS CHANGED POD"
    assert lines[1] == "node3 kube-proxy v1.30.8 differs 2 1970-01-01 00:16:40Z kube-system/node3"
    assert lines[2].startswith("settings: masqueradeAll false, masqueradeBit 14,")


def test_only_nodes_that_differ_are_read_again() -> None:
    source, time, _ = usual()
    assert sorted(source.reads[SIZE.nodes :]) == ["node13", "node3"]
    assert source.lists == 2
    assert time.slept == [2.0], "the objects changed long ago"


def test_a_node_that_catches_up_meanwhile_follows() -> None:
    source = Source(changed_at=NOW - 1)

    def wake(_: int) -> None:
        source.old = {}

    results = results_of(source, Time(wake))
    assert results["node3"].verdict is NodeVerdict.FOLLOWS
    assert results["node13"].verdict is NodeVerdict.FOLLOWS


@pytest.mark.parametrize("changed_at", [NOW - 1, None])
def test_a_node_differs_only_after_the_sync_period_if_objects_changed_lately(
    changed_at: float | None,
) -> None:
    time = Time()
    results = results_of(Source(changed_at=changed_at), time)
    assert sum(time.slept) >= SYNC_PERIOD
    assert results["node3"].verdict is NodeVerdict.DIFFERS


def test_services_that_change_at_each_reading_make_no_node_stale() -> None:
    source = Source(changed_at=NOW)

    def wake(times: int) -> None:
        source.cluster = renewed(source.cluster, times)

    results = results_of(source, Time(wake))
    assert results["node3"].verdict is NodeVerdict.CATCHING_UP
    assert source.reads.count("node3") == 4


def renewed(objects: Cluster, number: int) -> Cluster:
    """Return the same objects with a new time in every slice."""
    new = Cluster()
    services = tuple(objects.services())
    slices = [it for one in services for it in objects.all_slices_of(one.key)]
    new.apply(Listed(Kind.SERVICE, services))
    later = (msgspec.structs.replace(it, trigger_time=NOW + number) for it in slices)
    new.apply(Listed(Kind.ENDPOINT_SLICE, tuple(later)))
    new.apply(Listed(Kind.NODE, tuple(it.node for it in nodes(SIZE))))
    return new


def compared(
    rules: Mapping[Family, Ruleset], objects: Cluster, one: FleetNode, proxy: str = ""
) -> NodeResult:
    return NodeComparison(objects).compare(state_of(one.node, rules, proxy))


def ipv4(one: FleetNode, objects: Cluster, **options: Any) -> dict[Family, Ruleset]:
    """Return the rules of a node with other options."""
    base = context(one.node)
    changed = msgspec.structs.replace(base, options=msgspec.structs.replace(base.options, **options))
    return {Family.IPV4: rules_in_form(one.form, objects, changed)}


@pytest.mark.parametrize(
    "options",
    [
        {"masquerade_all": True},
        {"local_traffic": None},
        {"local_traffic": LocalTraffic(interface="cni0")},
        {"local_traffic": LocalTraffic(source="10.244.1.0/24")},
        {"masquerade_bit": 5},
    ],
)
def test_other_settings_make_no_service_wrong(options: dict[str, Any]) -> None:
    one = FleetNode(nodes(SIZE)[1].node, NodeKind.FOLLOWS, Form.V1_36)
    found = inferred_settings(ipv4(one, followed(), **options)[Family.IPV4])
    assert found
    for name, value in options.items():
        assert getattr(found, name) == value
    assert compared(ipv4(one, followed(), **options), followed(), one).wrong == ()


@pytest.mark.parametrize("form", [Form.V1_22, Form.V1_36])
def test_the_network_of_the_node_tells_which_endpoint_needs_masquerading(form: Form) -> None:
    """A local pod that reaches itself is masqueraded only by a rule of its own; others are masqueraded anyway."""
    one = FleetNode(nodes(SIZE)[1].node, NodeKind.FOLLOWS, form)
    rules = ipv4(one, followed(), local_traffic=LocalTraffic(source=one.node.pod_cidrs[0]))
    comparison = NodeComparison(followed())
    assert comparison.compare(state_of(one.node, rules)).verdict is NodeVerdict.FOLLOWS
    for endpoint, wrong in (("10.244.8.3", []), ("10.244.1.3", ["service1"])):
        broken = without(rules[Family.IPV4], f"-s {endpoint}/32 ")
        result = comparison.compare(state_of(one.node, {Family.IPV4: broken}))
        assert [it.name for it in result.wrong] == wrong, endpoint


def without(rules: Ruleset, start: str) -> Ruleset:
    """Return the rules but the one that starts so."""
    chains = {key: tuple(it for it in some if not it.startswith(start)) for key, some in rules.chains.items()}
    assert chains != rules.chains
    return Ruleset(rules.family, chains)


def test_other_settings_are_one_paragraph() -> None:
    results = []
    for one in nodes(Size(8)):
        options = {"masquerade_all": True} if one.node.name in ("node2", "node5") else {}
        results.append(compared(ipv4(one, followed(), **options), followed(), one))
    lines = shown(results)
    assert "node2 and node5: masqueradeAll is true, but false on most nodes" in lines
    assert "8 nodes: 8 follow." in lines


def test_one_service_without_masquerading_is_wrong_not_a_setting() -> None:
    one = nodes(SIZE)[1]
    rules = ipv4(one, followed())[Family.IPV4]
    key, some = next(
        (k, it) for k, it in rules.chains.items() if k.chain.startswith("KUBE-SVC-") and "! -s" in it[0]
    )
    broken = Ruleset(rules.family, {**rules.chains, key: some[1:]})
    result = compared({Family.IPV4: broken}, followed(), one)
    (difference,) = [one for it in result.wrong for one in it.differences]
    assert (difference.origin, difference.text) == ("", "not masqueraded, should be")


def test_a_lost_jump_to_the_node_ports_is_no_setting() -> None:
    one = nodes(SIZE)[1]
    rules = ipv4(one, followed())[Family.IPV4]
    chains = {
        key: tuple(it for it in some if not it.endswith("-j KUBE-NODEPORTS"))
        for key, some in rules.chains.items()
    }
    result = compared({Family.IPV4: Ruleset(Family.IPV4, chains)}, followed(), one)
    places = {place for it in result.wrong for one in it.differences for place in one.at}
    assert places == {"node port 30000", "node port 30010", "node port 30020"}


def test_a_node_without_rules_differs_as_a_whole() -> None:
    one = nodes(SIZE)[0]
    result = compared({Family.IPV4: Ruleset(Family.IPV4, {ChainKey("nat", "OUTPUT"): ()})}, followed(), one)
    assert result.verdict is NodeVerdict.DIFFERS
    assert not result.wrong
    assert "node0: has no rules of a service proxy" in shown([result])


@pytest.mark.parametrize(
    ("node_has", "service_has", "reason"),
    [
        (True, True, "has no IPv6 rules of a service proxy"),
        (False, True, ""),
        (True, False, ""),
    ],
)
def test_a_node_may_lack_the_rules_of_one_family(node_has: bool, service_has: bool, reason: str) -> None:
    one = nodes(SIZE)[1]
    (service,) = cluster(Size(4, services=1)).services()
    if service_has:
        service = msgspec.structs.replace(service, cluster_ips=(*service.cluster_ips, "fd00:10:96::1"))
    objects = with_objects(service)
    if node_has:
        node = msgspec.structs.replace(one.node, addresses=(*one.node.addresses, "fd00::2"))
        one = one._replace(node=node)
    rules = {**ipv4(one, objects), Family.IPV6: Ruleset(Family.IPV6, {ChainKey("nat", "OUTPUT"): ()})}
    result = compared(rules, objects, one)
    assert result.reason == (reason or None)
    assert result.verdict is (NodeVerdict.DIFFERS if reason else NodeVerdict.FOLLOWS)


def with_objects(service: Service, *slices: EndpointSlice) -> Cluster:
    objects = Cluster()
    objects.apply(Listed(Kind.SERVICE, (service,)))
    objects.apply(Listed(Kind.ENDPOINT_SLICE, slices))
    return objects


def test_a_service_of_another_proxy_needs_no_rules() -> None:
    objects = cluster(Size(4, services=1))
    (service,) = objects.services()
    labelled = with_objects(
        msgspec.structs.replace(service, proxy_name="other"), *objects.all_slices_of(service.key)
    )
    one = nodes(Size(4))[1]
    assert compared(tables(one, labelled), labelled, one).verdict is NodeVerdict.FOLLOWS
    assert compared(tables(one, objects), objects, one).verdict is NodeVerdict.FOLLOWS
    assert compared(tables(one, labelled), objects, one).verdict is NodeVerdict.DIFFERS


def test_nodes_of_other_zones_have_other_endpoints() -> None:
    objects = cluster(Size(4, services=3))
    service = objects.service(Key("default", "service1"))
    assert service
    (slice_,) = objects.all_slices_of(service.key)
    hinted = tuple(
        msgspec.structs.replace(it, zone_hints=(f"zone{index % 3}",))
        for index, it in enumerate(slice_.endpoints)
    )
    objects = with_objects(service, msgspec.structs.replace(slice_, endpoints=hinted))
    comparison = NodeComparison(objects)
    for one in nodes(Size(4)):
        assert comparison.compare(state_of(one.node, tables(one, objects))).verdict is NodeVerdict.FOLLOWS
    zone0, zone1 = nodes(Size(4))[:2]
    wrong = comparison.compare(state_of(zone1.node, tables(zone0, objects))).wrong
    assert [it.name for it in wrong] == ["service1"]


def test_the_name_of_a_proxy_cannot_forge_a_row() -> None:
    lines = shown([NodeResult("node1", NodeVerdict.FOLLOWS, proxy="proxy\nnode2  other")]).splitlines()
    assert [it.split()[:1] for it in lines[:3]] == [["NODE"], ["node1"], []]


def test_the_table_names_each_node_and_groups_equal_differences() -> None:
    _, _, results = usual()
    lines = shown(results.values()).splitlines()
    assert lines[0].split() == ["NODE", "PROXY", "VERDICT", "WRONG", "OBJECTS", "CHANGED"]
    assert [it.split()[0] for it in lines[1:4]] == ["node0", "node1", "node2"], "node10 comes after node9"
    assert "node3   kube-proxy v1.30.8   differs           2  1970-01-01 00:16:40Z" in lines
    assert lines.count("node3 and node13: 2 wrong Services") == 1
    assert "node7 and node17: runs kube-proxy in IPVS mode" in lines
    assert lines[-1] == "20 nodes: 16 follow, 2 differ, 2 not compared."


def test_the_document_has_the_same() -> None:
    _, _, results = usual()
    found = json.loads(json_text(document(diff_report(results.values()))))
    assert found["different"] is True
    node = found["nodes"][3]
    assert (node["node"], node["verdict"], node["objectsChanged"]) == (
        "node3",
        "differs",
        "1970-01-01T00:16:40Z",
    )
    assert [it["name"] for it in node["wrong"]] == ["service3", "service4"]
    assert found["nodes"][7]["otherProxy"] is True
    assert found["otherSettings"] == []


def test_the_meaning_of_equal_rules_is_found_once_for_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[object] = []
    walk = meaning.walk

    def counting_walk(*some: Any, **more: Any) -> Any:
        walks.append(some)
        return walk(*some, **more)

    monkeypatch.setattr(meaning, "walk", counting_walk)
    comparison = NodeComparison(followed())
    first, second = (FleetNode(nodes(SIZE)[it].node, NodeKind.STALE, Form.V1_36) for it in (1, 2))
    assert comparison.compare(state_of(first.node, tables(first, stale()))).wrong
    assert walks
    walks.clear()
    assert comparison.compare(state_of(second.node, tables(second, stale()))).wrong
    assert not walks


def test_a_verdict_depends_on_no_other_node() -> None:
    """Nodes differ in one rule each, and are compared in both orders."""
    mutants: list[NodeState] = []
    for one in nodes(Size(4)):
        rules = ipv4(one, followed())[Family.IPV4]
        places = [key for key, some in sorted(rules.chains.items()) if some and key.chain.startswith("KUBE-")]
        for number, key in enumerate(places[len(mutants) :: 60]):
            some = rules.chains[key]
            changed = some[1:] if number % 2 else ("-m socket -j RETURN", *some[1:])
            broken = Ruleset(rules.family, {**rules.chains, key: changed})
            mutants.append(state_of(one.node, {Family.IPV4: broken}))
    alone = [NodeComparison(followed()).compare(it) for it in mutants]
    assert {it.verdict for it in alone} == {NodeVerdict.FOLLOWS, NodeVerdict.DIFFERS}
    for step in (1, -1):
        comparison = NodeComparison(followed())
        assert [comparison.compare(it) for it in mutants[::step]] == alone[::step]


@pytest.mark.parametrize("name", [it for it in NAMES if it.startswith("random-")][::12])
def test_rules_desired_on_any_node_are_those_that_render_gives(name: str) -> None:
    """Nodes share what is rendered only where they have the same rules."""
    case = load_case(name)
    objects, node = cluster_of(case), node_of(case)
    desired = DesiredRules(objects)
    endpoints = [
        it
        for one in objects.services()
        for slice_ in objects.all_slices_of(one.key)
        for it in slice_.endpoints
    ]
    names = {"stranger", *(it.node_name for it in endpoints)} - {""}
    zones = {"", *(it.zone for it in endpoints)}
    for family in Family:
        base = rule_context(config_of(case), node.name, node, KernelFacts(addresses=ADDRESSES), family)
        for topology in (NodeTopology(*it) for it in product(sorted(names), sorted(zones))):
            on_node = msgspec.structs.replace(base, node=topology)
            expected = installed(render_rules(objects, on_node), on_node.options)
            assert desired.ruleset(on_node, {}).chains == expected.chains, topology


def test_chains_of_equal_rules_are_numbered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    numbered: list[object] = []
    number = SharedNumbers.number

    def counting_number(numbers: SharedNumbers, *some: Any) -> Any:
        numbered.append(some)
        return number(numbers, *some)

    monkeypatch.setattr(SharedNumbers, "number", counting_number)
    comparison = NodeComparison(followed())
    one = FleetNode(nodes(SIZE)[1].node, NodeKind.FOLLOWS, Form.V1_30)
    comparison.compare(state_of(one.node, tables(one, followed())))
    assert numbered
    numbered.clear()
    assert comparison.compare(state_of(one.node, tables(one, followed()))).verdict is NodeVerdict.FOLLOWS
    assert not numbered


def test_numbers_from_before_and_after_some_are_forgotten_do_not_mix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They differ, so all rules would be walked."""
    monkeypatch.setattr("pykubeproxy.inspect.meaning.fingerprints._MOST_CHAINS", 1)
    monkeypatch.setattr(meaning, "walk", lambda *_, **__: pytest.fail("rules are walked"))
    comparison = NodeComparison(followed())
    for form in (Form.V1_30, Form.V1_36, Form.V1_30):
        one = FleetNode(nodes(SIZE)[1].node, NodeKind.FOLLOWS, form)
        assert comparison.compare(state_of(one.node, tables(one, followed()))).verdict is NodeVerdict.FOLLOWS


AGENT = "pykubeproxy 0.1.0"


def agent_rules(one: FleetNode, objects: Cluster, **settings: Any) -> dict[Family, Ruleset]:
    """Return the rules of an agent with these settings in its RuleContext."""
    on = msgspec.structs.replace(context(one.node), **settings)
    return {Family.IPV4: installed(render_rules(objects, on), on.options)}


@pytest.mark.parametrize("port", ["", ":http"])
def test_a_quarantined_service_is_named_and_not_called_wrong(port: str) -> None:
    """A rule rejects what goes to the cluster IP of a Service that is too large; for a port there are more rules."""
    one = nodes(SIZE)[1]
    key = Key("default", "service20")
    rules = quarantined(one, followed(), key) if port else agent_rules(one, followed(), max_service_pairs=5)
    result = compared(rules, followed(), one, AGENT)
    assert result.verdict is NodeVerdict.FOLLOWS, result.wrong
    assert str(key) in result.quarantined
    lines = shown([result])
    assert "quarantined Service" in lines
    assert "default/service20" in lines


def many_with_affinity() -> Cluster:
    """A cluster with 12 Services that ask for affinity, each of 100 endpoints: 600 more lists than the default allows."""
    found = Cluster()
    for number in range(12):
        name = f"sticky{number}"
        ports = (EndpointPort("http", Protocol.TCP, 8080),)
        endpoints = tuple(Endpoint(f"10.244.{number}.{it + 1}") for it in range(100))
        service = Service(
            "default",
            name,
            cluster_ips=(f"10.96.7.{number + 1}",),
            ports=(Port("http", Protocol.TCP, 80),),
            affinity_seconds=10800,
            created=float(number),
        )
        found.apply(Updated(service))
        found.apply(Updated(EndpointSlice("default", name, name, Family.IPV4, endpoints, ports)))
    return found


@pytest.mark.parametrize("limit", [0, 500, 830, 5000])
def test_a_bound_on_affinity_is_no_difference(limit: int) -> None:
    """Neither is that kube-proxy has none: 0."""
    one, objects = nodes(SIZE)[1], many_with_affinity()
    rules = agent_rules(one, objects, max_affinity_lists=limit)
    for proxy in (AGENT, "kube-proxy v1.36.0"):
        result = compared(rules, objects, one, proxy)
        assert result.verdict is NodeVerdict.FOLLOWS, result.wrong


@pytest.mark.parametrize("limit", [0, 500])
def test_rules_that_lack_affinity_for_another_reason_differ(limit: int) -> None:
    """The oldest Service keeps affinity under any bound that it fits."""
    one, objects, without = nodes(SIZE)[1], many_with_affinity(), many_with_affinity()
    plain = without.service(Key("default", "sticky0"))
    assert plain
    without.apply(Updated(msgspec.structs.replace(plain, affinity_seconds=None, created=0.0)))
    on = msgspec.structs.replace(context(one.node), max_affinity_lists=limit)
    if limit:  # the others as if it had kept its affinity
        for number in range(5, 12):
            key = Key("default", f"sticky{number}")
            found = without.service(key)
            assert found
            without.apply(Updated(msgspec.structs.replace(found, affinity_seconds=None)))
    rules = {Family.IPV4: installed(render_rules(without, on), on.options)}
    result = compared(rules, objects, one, AGENT)
    assert [it.name for it in result.wrong] == ["sticky0"]


def quarantined(one: FleetNode, objects: Cluster, key: Key) -> dict[Family, Ruleset]:
    """Return the rules of an agent that quarantined the ports of a Service."""
    on = context(one.node)
    rules = {
        port.port.name: reject_rules(port.port, on.options)
        if service.key == key
        else port_rules(port.port, port.selection, on.options)
        for service in objects.services()
        for port in resolve_ports(objects, service.key, Family.IPV4, on.node)
    }
    return {Family.IPV4: installed(assemble(rules, on.options, on.node_port_jumps), on.options)}


def test_a_service_of_a_node_with_another_one_in_quarantine_can_be_wrong() -> None:
    one = nodes(SIZE)[1]
    result = compared(quarantined(one, stale(), Key("default", "service1")), followed(), one, AGENT)
    assert [it.name for it in result.wrong] == ["service3", "service4"]
    assert result.quarantined == ("default/service1",)


@pytest.mark.parametrize(("proxy", "wrong"), [(AGENT, []), ("kube-proxy v1.36.0", ["service0"])])
def test_an_agent_serves_no_external_address_of_the_api_server(proxy: str, wrong: list[str]) -> None:
    one = nodes(SIZE)[1]
    servers = frozenset({("203.0.113.1", 80)})
    rules = agent_rules(one, followed(), reserved=dict.fromkeys(servers, Reserved.API_SERVER))
    result = NodeComparison(followed(), api_servers=servers).compare(state_of(one.node, rules, proxy))
    assert [it.name for it in result.wrong] == wrong


@pytest.mark.parametrize(("proxy", "wrong"), [(AGENT, []), ("kube-proxy v1.36.0", ["service5"])])
def test_an_agent_serves_no_external_address_of_its_own_pages(proxy: str, wrong: list[str]) -> None:
    one = nodes(SIZE)[1]
    service = followed().service(Key("default", "service5"))
    assert service
    ports = (msgspec.structs.replace(service.ports[0], port=HEALTH_PORT),)
    claiming = msgspec.structs.replace(service, ports=ports, external_ips=one.node.addresses[:1])
    objects = changed(followed(), claiming)
    reserved = {(one.node.addresses[0], HEALTH_PORT): Reserved.OWN_PAGES}
    result = compared(agent_rules(one, objects, reserved=reserved), objects, one, proxy)
    assert [it.name for it in result.wrong] == wrong


@pytest.mark.parametrize(("proxy", "wrong"), [(AGENT, ["service6"]), ("kube-proxy v1.36.0", [])])
def test_any_service_with_an_address_may_win_in_kube_proxy(proxy: str, wrong: list[str]) -> None:
    """It writes rules in random order; our agents put cluster IPs first."""
    one = nodes(SIZE)[1]
    thief = followed().service(Key("default", "service5"))
    assert thief
    stealing = msgspec.structs.replace(thief, external_ips=("10.96.0.7",))
    objects = changed(followed(), stealing)
    (rules,) = agent_rules(one, objects).values()
    key = ChainKey("nat", "KUBE-SERVICES")
    other_order = Ruleset(rules.family, {**rules.chains, key: tuple(reversed(rules.chains[key]))})
    result = compared({Family.IPV4: other_order}, objects, one, proxy)
    assert [it.name for it in result.wrong] == wrong
    if not wrong:
        lines = shown([result])
        assert "node1: 10.96.0.7:80 belongs to default/service5 and default/service6" in lines


def changed(objects: Cluster, service: Service) -> Cluster:
    """Return the objects with another version of a Service."""
    new = Cluster()
    services = tuple(service if it.key == service.key else it for it in objects.services())
    slices = [it for one in services for it in objects.all_slices_of(one.key)]
    new.apply(Listed(Kind.SERVICE, services))
    new.apply(Listed(Kind.ENDPOINT_SLICE, tuple(slices)))
    return new
