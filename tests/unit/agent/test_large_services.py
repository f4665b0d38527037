"""Large Services wait for their turn; oversized ones are not served."""

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import click
import msgspec
import pytest

from pykubeproxy.agent.notices import SyncReport
from pykubeproxy.agent.observe.health_checks import DesiredChecks
from pykubeproxy.agent.pending import Budget
from pykubeproxy.agent.tables import FamilyTables
from pykubeproxy.agent.write import SyncFailed
from pykubeproxy.config import Dispatch
from pykubeproxy.inspect.dump.model import views
from pykubeproxy.inspect.dump.report import service_blocks
from pykubeproxy.inspect.explain.model import explain_all
from pykubeproxy.inspect.targets import ServiceFilter
from pykubeproxy.kernel import Failed
from pykubeproxy.objects import (
    Deleted,
    EndpointPort,
    EndpointSlice,
    Event,
    Family,
    Key,
    Kind,
    Port,
    Protocol,
    Updated,
)
from pykubeproxy.report.text import text
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.names import cluster_chain
from pykubeproxy.rules.ownership import is_ours
from pykubeproxy.rules.render import render
from pykubeproxy.services.ports import PortName, ServiceSkipReason
from tests.fakes.drift import scope
from tests.fakes.iptables import fail_on
from tests.fakes.synced import SyncedFamily, flags_context
from tests.objects import endpoint, service, slice_of
from tests.packet_model import Packet, Walker

SMALL = (Updated(service("small")), Updated(slice_of("10.244.1.5", service="small")))


def large(
    *hosts: int, name: str = "large", namespace: str = "ns", cluster_ip: str = "10.96.0.11"
) -> tuple[Event, ...]:
    made = service(name, cluster_ip=cluster_ip), slice_of(*(f"10.244.2.{it}" for it in hosts), service=name)
    return tuple(Updated(msgspec.structs.replace(it, namespace=namespace)) for it in made)


FEW = Budget(2, 2)


def new_node(limit: int = 0, budget: Budget = FEW) -> SyncedFamily:
    """Return empty tables; more than two pairs make a Service large, unless the budget has others."""
    return SyncedFamily(context=flags_context(max_service_pairs=str(limit)), budget=budget)


def served(*events: Event, budget: Budget = FEW) -> SyncedFamily:
    """Return tables after a sync and the turn of a large Service."""
    node = new_node(budget=budget)
    node.sync(*events)
    node.turn()
    return node


def test_a_new_large_service_waits_for_its_turn() -> None:
    """A small one of the same sync is served before."""
    node = new_node()
    node.sync(*SMALL, *large(1, 2, 3))
    assert node.targets() == {"10.244.1.5:8080"}
    assert node.tables.waiting
    report = node.turn()
    assert (report.full, len(node.targets()), node.tables.waiting) == (False, 4, False)


def test_a_changed_large_service_keeps_its_rules_meanwhile() -> None:
    node = served(*large(1, 2, 3))
    node.sync(*large(2, 3, 4), *SMALL)
    assert {"10.244.1.5:8080", "10.244.2.1:8080"} < node.targets()
    node.turn()
    assert "10.244.2.1:8080" not in node.targets()
    assert "10.244.2.4:8080" in node.targets()


@pytest.mark.parametrize("dispatch", ["flat", "tree"])
def test_a_waiting_service_gives_up_its_addresses_in_the_same_sync(dispatch: str) -> None:
    """Another Service may get one of them then; many other losses may come before."""
    node = new_node()
    options = msgspec.structs.replace(node.context.options, dispatch=Dispatch(dispatch))
    node.context = msgspec.structs.replace(node.context, options=options)

    def claims(*external_ips: str, node_port: int = 0, number: int = 80) -> Event:
        port = Port("http", Protocol.TCP, number, node_port)
        made = service("large", cluster_ip="10.96.0.11", external_ips=external_ips, ports=(port,))
        return Updated(msgspec.structs.replace(made, type="NodePort"))

    def found(text: str) -> bool:
        return any(text in rule for rules in node.live.save().chains.values() for rule in rules)

    node.sync(*SMALL, *large(1, 2, 3), claims("192.0.2.1", "192.0.2.2", node_port=30001))
    node.turn()
    assert found("192.0.2.1/32")
    assert found("--dport 30001 ")
    node.sync(claims("192.0.2.2", node_port=30002))
    assert node.tables.pending.losing
    assert not found("192.0.2.1/32")
    assert not found("--dport 30001 ")
    assert found("-d 192.0.2.2/32")
    node.sync(claims("192.0.2.2", number=81))
    assert not found("-d 192.0.2.2/32 ")
    node.lose()
    node.turn()
    fresh = new_node()
    fresh.cluster, fresh.context = node.cluster, node.context
    fresh.sync()
    fresh.turn()
    assert node.live.save().chains == fresh.live.save().chains


def test_a_full_sync_keeps_the_rules_of_a_waiting_service() -> None:
    node = served(*SMALL, *large(1, 2, 3))
    node.tables.distrust()
    assert node.sync(*large(1, 2, 4)).full
    assert "10.244.2.3:8080" in node.targets()
    node.turn()
    assert not node.tables.waiting
    assert "10.244.2.3:8080" not in node.targets()


def test_a_restart_keeps_a_large_service_served() -> None:
    """The new agent does not know the rules that the old one wrote."""
    node = served(*SMALL, *large(1, 2, 3))
    node.restart()
    assert not node.sync().wrote
    assert not node.turn().wrote
    assert not node.tables.waiting


@pytest.mark.parametrize("dispatch", ["flat", "tree"])
def test_a_restart_leaves_no_address_that_has_moved_meanwhile(dispatch: str) -> None:
    """The first sync gives it to the Service that has it now. It also tells that the flows of others are not stale."""
    node = served(*large(1, 2, 3), *large(4, 5, 6, name="other", cluster_ip="10.96.0.12"))
    node.turn()
    options = msgspec.structs.replace(node.context.options, dispatch=Dispatch(dispatch))
    node.context = msgspec.structs.replace(node.context, options=options)
    for event in (Updated(service("large", cluster_ip="10.96.0.99")), *SMALL):
        node.cluster.apply(event)
    node.cluster.apply(Updated(service("small", cluster_ip="10.96.0.11")))
    node.restart()
    report = node.sync()
    packet = Packet("10.244.9.9", "10.96.0.11", "tcp", 80, states=frozenset({"NEW"}))
    walker = Walker(node.live.save())
    assert {it.verdict for it in walker.walk(packet, *skeleton.NAT_SERVICES)} == {"to 10.244.1.5:8080"}
    assert {port.port.name.service for port in report.resolved} == {"large", "other", "small"}
    assert not node.tables.pending.losing


def test_a_deleted_or_smaller_service_does_not_wait() -> None:
    node = served(*large(1, 2, 3))
    node.sync(*large(1, 2))
    assert node.targets() == {"10.244.2.1:8080", "10.244.2.2:8080"}
    node.sync(*large(1, 2, 3))
    assert node.tables.waiting
    node.sync(Deleted(Kind.SERVICE, Key("ns", "large")))
    assert not node.tables.waiting
    assert node.targets() == set()


def test_an_oversized_service_is_quarantined_with_both_numbers() -> None:
    """One rule rejects connections to all its ports; `render` agrees, and others are served."""
    node = new_node(limit=2)
    report = node.sync(*SMALL, *large(1, 2, 3))
    (quarantined,) = report.quarantined
    assert (str(quarantined.port_name), quarantined.port_name.protocol) == ("ns/large", "")
    assert quarantined.reason == (
        "it has 3 pairs of a port and an endpoint or address, more than maxServicePairs, 2"
    )
    assert node.targets() == {"10.244.1.5:8080"}
    (rule,) = node.live.save().chains[skeleton.FILTER_SERVICES]
    assert rule.startswith('-d 10.96.0.11/32 -m comment --comment "ns/large is quarantined" -j REJECT')
    rendered = render(node.cluster, node.context)
    live = node.live.save().chains
    assert {key: live[key] for key in rendered.chains} == rendered.chains
    assert not node.tables.waiting


def test_a_served_service_that_becomes_oversized_loses_its_rules() -> None:
    """And gets them back when it is small enough; `since` stays meanwhile."""
    node = new_node(limit=2)
    node.sync(*SMALL, *large(1, 2))
    assert len(node.targets()) == 3
    (first,) = node.sync(*large(1, 2, 3)).quarantined
    (second,) = node.sync(*large(1, 2, 3, 4)).quarantined
    assert first.since == second.since
    assert len(node.targets()) == 1
    report = node.sync(*large(3))
    assert (report.quarantined, node.targets()) == ((), {"10.244.1.5:8080", "10.244.2.3:8080"})
    assert node.live.save().chains[skeleton.FILTER_SERVICES] == ()


def test_a_deleted_oversized_service_leaves_quarantine() -> None:
    node = new_node(limit=2)
    node.sync(*large(1, 2, 3))
    assert node.sync(Deleted(Kind.SERVICE, Key("ns", "large"))).quarantined == ()
    assert node.live.save().chains[skeleton.FILTER_SERVICES] == ()


def test_dump_rules_shows_an_oversized_service() -> None:
    """With all its ports as one."""
    node = new_node(limit=2)
    node.sync(*large(1, 2, 3))
    shown = click.unstyle(text(service_blocks(views(node.live.save(), {}))))
    assert "ns/large" in shown
    assert "cluster IP 10.96.0.11, all ports" in shown
    assert "rejected: quarantined" in shown


def test_explain_says_that_a_service_is_oversized() -> None:
    node = new_node(limit=2)
    node.sync(*SMALL, *large(1, 2, 3))
    found = explain_all(node.cluster, ServiceFilter(name="large"), {Family.IPV4: node.context})
    assert found[0].skipped == {Family.IPV4: ServiceSkipReason.OVERSIZED}
    assert found[0].ports == ()


def test_a_flushed_large_service_is_repaired_at_once() -> None:
    """Others jump to its chains, and a jump to a missing chain is rejected."""
    node = served(*SMALL, *large(1, 2, 3))
    before = node.live.save().chains
    for key in before:
        if key.table == "nat" and key.chain.startswith("KUBE-"):
            del node.live.tables["nat"][key.chain]
    assert node.tables.note_drift(scope(["nat"]))
    node.sync()
    assert node.live.save().chains == before
    node.live.tables.clear()
    node.tables.distrust()
    node.sync()
    assert {key: node.live.save().chains[key] for key in before} == before


def test_flushed_rules_of_a_large_service_are_repaired_at_once() -> None:
    """Also if all its chains are still there."""
    node = served(*SMALL, *large(1, 2, 3))
    before = node.live.save().chains
    node.live.tables["nat"] = dict.fromkeys(node.live.tables["nat"], ())
    assert node.tables.note_drift(scope(["nat"]))
    node.sync()
    assert {key: node.live.save().chains[key] for key in before} == before
    assert not node.tables.waiting


def test_a_large_service_that_is_no_longer_served_does_not_wait() -> None:
    """Another Service may get its cluster IP."""
    node = served(*large(1, 2, 3))
    made = node.cluster.service(Key("ns", "large"))
    assert made
    node.sync(Updated(msgspec.structs.replace(made, type="ExternalName", cluster_ips=())))
    assert node.targets() == set()
    assert not node.tables.waiting


def test_a_failing_large_service_keeps_no_other_waiting() -> None:
    node = new_node()
    node.sync(*SMALL)
    node.live.on_restore = fail_on("10.244.2.1:")
    node.sync(*large(1, 2, 3, name="failing"), *large(4, 5, 6, name="other", cluster_ip="10.96.0.12"))
    with pytest.raises(SyncFailed):
        node.turn()
    node.sync()
    node.turn()
    assert "10.244.2.4:8080" in node.targets()
    assert node.tables.waiting == 1


def test_a_large_service_that_fails_halfway_does_not_stop_others() -> None:
    """Its first port uses a new endpoint chain by then, which the next full sync must not delete."""
    node = new_node()
    ports = tuple(Port(name, Protocol.TCP, 80 + number) for number, name in enumerate("abc"))
    made = Updated(service("large", cluster_ip="10.96.0.11", ports=ports))
    targets = tuple(EndpointPort(port.name, Protocol.TCP, 8080 + port.port) for port in ports)
    first, grown = (
        Updated(slice_of(*(f"10.244.2.{n}" for n in hosts), service="large", ports=targets))
        for hosts in ((1, 2), (1, 2, 3))
    )
    node.tables = FamilyTables(node.live, 1, Budget(7, 7))
    node.sync(*SMALL, made, first)
    node.turn()
    restore = node.live.restore

    def fail(text: str) -> None:
        before, found, _ = text.partition(f"-A {cluster_chain(PortName('ns', 'large', 'b', 'TCP'))} ")
        restore(before[: before.rfind("*")] if found else text)
        if found:
            raise Failed("iptables-restore", 1, "out of memory")

    node.live.restore = fail  # type: ignore[method-assign]
    node.sync(Updated(slice_of(service="small")), grown)
    outcomes = []
    for _ in range(6):
        try:
            outcomes.append(bool(node.turn()))
        except SyncFailed:
            outcomes.append(False)
        assert "10.244.2.3:8160" in node.targets()
        assert not node.sync(*SMALL).full
        assert node.live.save().chains[skeleton.FILTER_SERVICES] == ()
        assert "10.244.1.5:8080" in node.targets()
        node.sync(Updated(slice_of(service="small")))
    # After a failure, each port has a turn of its own.
    assert outcomes == [False, True, False, True, False, False]
    assert node.targets() >= {"10.244.2.3:8160", "10.244.2.3:8162"}
    # A dead endpoint leaves the ports that can be written; the other one keeps failing, and stops nobody.
    assert isinstance(grown.object, EndpointSlice)
    node.sync(*SMALL, Updated(msgspec.structs.replace(grown.object, endpoints=grown.object.endpoints[1:])))
    for _ in range(4):
        with contextlib.suppress(SyncFailed):
            node.lose()
        node.sync(*SMALL)
        assert "10.244.1.5:8080" in node.targets()
    assert {f"10.244.2.1:{8160 + n}" for n in range(3)} & node.targets() == {"10.244.2.1:8161"}


def test_namespaces_with_large_services_take_turns() -> None:
    """One with many Services does not keep others waiting."""
    node = new_node()
    for number in range(1, 6):
        addresses = [number * 10 + n for n in range(3)]
        node.sync(*large(*addresses, name=f"s{number}", namespace="many", cluster_ip=f"10.96.1.{number}"))
    node.sync(*large(1, 2, 3, name="web", namespace="one", cluster_ip="10.96.2.1"))
    turns = [node.turn().resolved[0].port.name for _ in range(6)]
    assert [(name.namespace, name.service) for name in turns] == [
        ("many", "s1"),
        ("one", "web"),
        *(("many", f"s{number}") for number in range(2, 6)),
    ]


def test_a_restart_keeps_a_large_service_served_whose_ports_have_changed() -> None:
    """Rules for new port names come in its turn; those that reject its clients stay."""
    node = served(*SMALL, *large(1, 2, 3))
    ports = (EndpointPort("new", Protocol.TCP, 8080),)
    addresses = tuple(f"10.244.2.{host}" for host in (1, 2, 3))
    node.cluster.apply(Updated(slice_of(*addresses, service="large", ports=ports)))
    made = service("large", cluster_ip="10.96.0.11", ports=(Port("new", Protocol.TCP, 80),))
    node.cluster.apply(Updated(made))
    node.restart()
    node.sync()
    node.turn()
    assert len(node.targets()) == 4
    node.sync(Updated(msgspec.structs.replace(made, external_ips=("192.0.2.1", "192.0.2.2", "192.0.2.3"))))
    node.sync(Updated(slice_of(service="large")))
    while node.tables.waiting:
        node.turn()
    rejecting = node.live.save().chains[skeleton.FILTER_SERVICES]
    node.restart()
    node.sync()
    assert node.live.save().chains[skeleton.FILTER_SERVICES] == rejecting != ()


def test_a_dead_endpoint_leaves_before_the_turn_of_its_service() -> None:
    """Without a new endpoint chain; only then does the Service wait."""
    node = served(*SMALL, *large(1, 2, 3, 4))
    assert node.sync(*large(2, 3, 4, 5)).deferred == {Key("ns", "large")}
    assert node.tables.pending.losing
    report = node.lose()
    assert not node.tables.pending.losing
    assert (report.chains_written, report.chains_deleted) == (1, 1)
    assert node.targets() == {"10.244.1.5:8080", *(f"10.244.2.{it}:8080" for it in (2, 3, 4))}
    assert node.turn().deferred == frozenset()
    assert "10.244.2.5:8080" in node.targets()


def test_new_endpoints_alone_cause_no_sync_before_the_turn() -> None:
    node = served(*large(1, 2, 3))
    for hosts in ((1, 2, 3, 4), (1, 2, 3, 4, 5, 6)):
        node.sync(*large(*hosts))
        assert not node.tables.pending.losing
    node.sync(*large(2, 3))
    assert node.tables.pending.losing
    node.lose()
    assert not node.tables.pending.losing


def test_a_service_that_loses_all_endpoints_rejects_clients_until_its_turn() -> None:
    node = served(*large(1, 2, 3))
    node.sync(*large(4, 5, 6))
    node.lose()
    (rule,) = node.live.save().chains[skeleton.FILTER_SERVICES]
    assert '"ns/large:http has no endpoints" -m tcp --dport 80 -j REJECT' in rule
    node.turn()
    assert node.live.save().chains[skeleton.FILTER_SERVICES] == ()
    assert len(node.targets()) == 3


def test_addresses_and_sources_of_a_waiting_service_go_at_once() -> None:
    """New ones come with them: they need no endpoint chains."""
    node = new_node()
    made, slice_ = large(1, 2, 3, 4)
    assert isinstance(made, Updated)
    balanced = msgspec.structs.replace(
        made.object,
        type="LoadBalancer",
        external_ips=("192.0.2.1", "192.0.2.2"),
        load_balancer_ips=("192.0.2.9",),
        source_ranges=("198.51.100.0/24", "203.0.113.0/24"),
    )
    node.sync(Updated(balanced), slice_)
    node.turn()
    fewer = {"external_ips": ("192.0.2.1",), "source_ranges": ("198.51.100.0/24",)}
    node.sync(Updated(msgspec.structs.replace(balanced, **fewer)))
    node.lose()
    rules = [rule for chain in node.live.save().chains.values() for rule in chain]
    assert not any("192.0.2.2/32" in rule or "203.0.113.0/24" in rule for rule in rules)
    assert any("-s 198.51.100.0/24" in rule for rule in rules)
    assert node.tables.waiting == 1


def pods(service_name: str, *hosts: int, namespace: str = "ns") -> tuple[Event, ...]:
    number = int(service_name[1:])
    return large(*hosts, name=service_name, namespace=namespace, cluster_ip=f"10.96.3.{number}")


def test_the_services_of_a_namespace_share_what_one_sync_does() -> None:
    """The smallest Services come first, and those of another namespace beside them."""
    node = new_node()
    node.sync()
    ours = [event for n in range(1, 5) for event in pods(f"s{n}", n)]
    others = large(5, name="web", namespace="other", cluster_ip="10.96.2.1")
    report = node.sync(*pods("s9", 8, 9), *ours, *others)
    assert report.deferred == {Key("ns", f"s{n}") for n in (2, 3, 4, 9)}
    assert node.targets() == {f"10.244.2.{host}:8080" for host in (1, 5)}
    last = frozenset({Key("ns", "s9")})
    assert [node.turn().deferred for _ in range(3)] == [last | {Key("ns", "s4")}, last, frozenset()]


def test_all_namespaces_share_what_one_sync_does() -> None:
    """Each gets as much, so one with few changes does not wait; the others take turns."""
    node = new_node()
    node.sync()
    many = [event for n in range(1, 21) for event in pods(f"s{n}", n, n + 20, namespace=f"many{n % 10}")]
    victim = large(50, name="web", namespace="victim", cluster_ip="10.96.2.1")
    report = node.sync(*many, *victim)
    assert node.targets() == {"10.244.2.50:8080"}
    assert len(report.deferred) == 20
    waiting = [Counter(it.namespace for it in node.turn().deferred) for _ in range(10)]
    assert [max(it.values()) for it in waiting] == [2] * 9 + [1]


def test_a_turn_takes_small_services_of_several_namespaces() -> None:
    """Honest changes all over the cluster take as many turns as in one namespace; no large Service is divided for them."""
    node = new_node(budget=Budget(0, 20))
    node.sync()
    node.sync(
        *large(1, 2, 3, name="web", namespace="web", cluster_ip="10.96.2.1"),
        *(event for n in range(10, 90) for event in pods(f"s{n}", n, namespace=f"ns{n}")),
    )
    assert [len(node.turn().resolved) for _ in range(5)] == [20, 20, 20, 20, 1]
    assert not node.tables.waiting


def test_a_first_sync_and_a_list_go_through_all_services() -> None:
    node = new_node()
    node.sync(*(event for n in range(1, 5) for event in pods(f"s{n}", n)))
    assert len(node.targets()) == 4
    changed = {
        key for n in range(1, 5) for event in pods(f"s{n}", n + 9) for key in node.cluster.apply(event)
    }
    node.tables.pending.changed(dict.fromkeys(changed, True), listed=True)
    report = node.sync()
    assert report.deferred == frozenset()
    assert node.targets() == {f"10.244.2.{n + 9}:8080" for n in range(1, 5)}


def test_entries_of_removed_services_go_at_once_and_their_chains_by_and_by() -> None:
    """A full sync after a failure finds the chains again; one that is used again is not deleted."""
    node = new_node(budget=Budget(2, 2, deleted=3))
    events = [event for n in range(1, 5) for event in pods(f"s{n}", n, n + 9)]
    node.sync(*events)
    report = node.sync(*(Deleted(Kind.SERVICE, Key("ns", f"s{n}")) for n in range(1, 5)))
    assert report.chains_deleted == 3
    assert node.live.save().chains[skeleton.NAT_SERVICES][:-1] == ()
    assert report.rules["nat"] == sum(
        len(rules) for key, rules in node.live.save().chains.items() if key.table == "nat" and is_ours(key)
    )
    assert node.tables.note_drift(scope(["nat"])) is None
    node.tables.distrust()
    assert node.sync(events[0]).chains_deleted == 3
    assert node.tables.waiting
    while node.tables.waiting:
        assert node.turn().chains_deleted <= 3
    assert node.targets() == {"10.244.2.1:8080", "10.244.2.10:8080"}


def test_unused_chains_never_pile_up() -> None:
    """A tenant replaces Services all the time: each sync deletes as many chains as it writes, if there are so many."""
    node = new_node(budget=Budget(8, 8, deleted=1))
    before: list[Event] = []
    counts = []
    for turn in range(6):
        names = [f"s{turn * 8 + n}" for n in range(8)]
        node.sync(*before, *(event for n, name in enumerate(names) for event in pods(name, n)))
        before = [Deleted(Kind.SERVICE, Key("ns", name)) for name in names]
        counts.append(len(node.live.save().chains))
    assert max(counts[1:]) == counts[1]


def test_a_service_that_fails_keeps_others_of_its_turn_waiting_once() -> None:
    """They share a turn, and after a failure each has one of its own."""
    node = new_node(budget=Budget(0, 4))
    node.sync()
    node.sync(*(event for n in range(1, 5) for event in pods(f"s{n}", n)))
    node.live.on_restore = fail_on("10.244.2.2:")
    for _ in range(8):
        with contextlib.suppress(SyncFailed):
            node.turn()
    assert node.targets() == {f"10.244.2.{n}:8080" for n in (1, 3, 4)}
    assert node.tables.waiting == 1


def test_ports_without_endpoints_delay_no_other_service() -> None:
    """A Service that loses its endpoints writes few rules, however many ports are rejected beside it."""
    node = new_node(budget=Budget(2, 1000))
    ports = tuple(Port(f"p{n}", Protocol.TCP, n) for n in range(1, 1500))
    node.sync(*SMALL, Updated(service("wide", cluster_ip="10.96.0.11", ports=ports)))
    while node.tables.waiting:
        node.turn()
    for endpoint_ready in (False, True):
        ready = endpoint("10.244.1.5", ready=endpoint_ready)
        report = node.sync(Updated(slice_of(ready, service="small")))
        assert 0 < report.rules_written["filter"] < 50


def test_a_waiting_service_gives_up_its_health_check_port_at_once() -> None:
    """The API server may give it to another Service, whose load balancer must not meet the old page."""
    node, checks = new_node(), DesiredChecks()
    local: dict[str, Any] = {"type": "LoadBalancer", "external_local": True, "health_check_node_port": 30500}
    made, endpoints = large(1, 2, 3)
    assert isinstance(made, Updated)
    node.sync(Updated(msgspec.structs.replace(made.object, **local)), endpoints)
    checks.sync_succeeded(node.turn())
    assert checks.checks()[Key("ns", "large")].port == 30500
    checks.sync_succeeded(node.sync(made, Updated(service("small", **local))))
    checks.sync_succeeded(node.lose())
    assert [*checks.checks()] == [Key("ns", "small")]
    assert node.tables.waiting == 1


def test_a_large_service_is_written_in_portions() -> None:
    """Changes of others come in between, also when all its ports lose an endpoint at once."""
    node = new_node(budget=Budget(7, 7))
    names = "abcdef"
    ports = tuple(Port(name, Protocol.TCP, 80 + number) for number, name in enumerate(names))
    targets = tuple(EndpointPort(name, Protocol.TCP, 8080) for name in names)

    def endpoints(*hosts: int) -> Event:
        return Updated(slice_of(*(f"10.244.2.{n}" for n in hosts), service="wide", ports=targets))

    def in_portions(work: Callable[[], SyncReport], waiting: Callable[[], bool], most: int) -> int:
        portions = 0
        while waiting():
            assert len(work().resolved) <= most
            portions += 1
            host = f"10.244.1.{portions}"
            node.sync(Updated(slice_of(host, service="small")))
            assert f"{host}:8080" in node.targets()
        return portions

    node.sync(*SMALL, Updated(service("wide", cluster_ip="10.96.0.11", ports=ports)), endpoints(1, 2, 3))
    assert in_portions(node.turn, lambda: node.tables.waiting > 0, 2) == 3
    assert node.targets() > {f"10.244.2.{host}:8080" for host in (1, 2, 3)}
    node.sync(endpoints(2, 3, 4))
    assert in_portions(node.lose, lambda: bool(node.tables.pending.losing), 2) == 3
    assert "10.244.2.1:8080" not in node.targets()
    assert "10.244.2.4:8080" not in node.targets()
    assert in_portions(node.turn, lambda: node.tables.waiting > 0, 2) == 3
    assert "10.244.2.4:8080" in node.targets()


def test_the_chain_of_each_port_counts() -> None:
    """With one endpoint, a port takes two chains."""
    node = new_node(budget=Budget(4, 4))
    names = "abcd"
    ports = tuple(Port(name, Protocol.TCP, 80 + number) for number, name in enumerate(names))
    targets = tuple(EndpointPort(name, Protocol.TCP, 8080) for name in names)
    node.sync()
    node.sync(
        Updated(service("wide", cluster_ip="10.96.0.11", ports=ports)),
        Updated(slice_of("10.244.2.1", service="wide", ports=targets)),
    )
    assert [len(node.turn().resolved) for _ in range(2)] == [2, 2]
    assert not node.tables.waiting


def test_a_port_with_many_endpoints_is_written_in_portions() -> None:
    """Nothing leads to its new chains before the last one."""
    node = new_node(budget=Budget(2, 2, portion=4))
    node.sync(*SMALL, *large(*range(1, 11)))
    entries = node.live.save().chains[skeleton.NAT_SERVICES]
    written = []
    while node.tables.waiting:
        assert node.live.save().chains[skeleton.NAT_SERVICES] == entries
        written.append(node.turn().chains_written)
        node.sync(*SMALL)
    # The last portion also writes the chain of the port and KUBE-SERVICES.
    assert written == [4, 4, 2 + 2]
    assert len(node.targets()) == 11
    assert len(node.live.save().chains[skeleton.NAT_SERVICES]) == len(entries) + 1


def test_a_port_in_portions_waits_after_a_failure() -> None:
    """The chains of the portions before are still there, and a restart goes on without them being in the way."""
    node = served(*SMALL, *large(*range(1, 11)), budget=Budget(2, 2, portion=4))
    node.tables.distrust()
    node.sync()
    assert len(node.targets()) == 5
    node.restart()
    node.sync()
    while node.tables.waiting:
        node.turn()
    fresh = new_node(budget=Budget(2, 2, portion=4))
    fresh.cluster = node.cluster
    fresh.sync()
    while fresh.tables.waiting:
        fresh.turn()
    assert node.live.save().chains == fresh.live.save().chains
