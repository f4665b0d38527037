"""Session affinity has a bound in each namespace: which Services keep it."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.config import load
from pykubeproxy.objects import (
    Deleted,
    EndpointPort,
    Event,
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
from pykubeproxy.rules.context import KernelFacts, RuleContext, rule_context
from pykubeproxy.rules.render import render
from pykubeproxy.services.cluster import ChangedServices, Cluster, kept_claims
from pykubeproxy.services.selection import ResolvedPort
from tests.objects import endpoint, service, slice_of
from tests.strategies import events

BOTH: dict[str, Any] = {"cluster_ips": ("10.96.0.10", "fd00:96::10")}


def sticky(name: str = "web", created: float = 0.0, **fields: Any) -> Service:
    return service(name, affinity_seconds=60, created=created, **fields)


def slice_for(name: str, endpoints: int, namespace: str = "ns", **fields: Any) -> Updated:
    made = slice_of(*(f"10.0.0.{it + 1}" for it in range(endpoints)), service=name, **fields)
    return Updated(msgspec.structs.replace(made, namespace=namespace))


def events_of(service_: Service, endpoints: int) -> tuple[Event, ...]:
    """Return a Service with this many endpoints, in its namespace."""
    return Updated(service_), slice_for(service_.name, endpoints, service_.namespace)


def cluster(*some: tuple[Event, ...]) -> Cluster:
    made = Cluster()
    for event in (it for each in some for it in each):
        made.apply(event)
    return made


def context(limit: int) -> RuleContext:
    config = load(None, {"max-affinity-lists": str(limit)}).config
    return rule_context(config, "node1", Node("node1"), KernelFacts(), Family.IPV4)


def unkept(made: Cluster, limit: int) -> set[str]:
    """Return the names of the Services that do not keep the affinity that they ask for."""
    return {it.name for it in made.services() if made.affinity.unkept_lists(it.key, limit)}


def resolved(made: Cluster, name: str, limit: int) -> ResolvedPort:
    found = context(limit).resolve(made, Key("ns", name))
    assert isinstance(found, tuple)
    return found[0]


def test_a_service_above_the_bound_is_served_without_affinity() -> None:
    """Its rules are those of a Service that does not ask for affinity."""
    made = cluster(events_of(sticky(), 4))
    assert resolved(made, "web", 4).port.affinity_seconds == 60
    port = resolved(made, "web", 3).port
    assert (port.affinity_seconds, port.unkept_lists) == (None, 4)
    plain = cluster(events_of(service(), 4))
    assert render(made, context(3)).chains == render(plain, context(3)).chains
    assert render(made, context(4)).chains != render(plain, context(4)).chains


def test_a_bound_of_0_keeps_all() -> None:
    made = cluster(events_of(sticky(), 200))
    assert resolved(made, "web", 0).port.affinity_seconds == 60


def test_each_port_needs_a_list_for_each_endpoint_of_both_families() -> None:
    """A client has affinity in both families or in none."""
    ports = tuple(Port(f"p{n}", Protocol.TCP, n) for n in (1, 2))
    slice_ports = tuple(EndpointPort(it.name, Protocol.TCP, 8080) for it in ports)
    made = cluster((Updated(sticky(ports=ports, **BOTH)), slice_for("web", 2, ports=slice_ports)))
    made.apply(Updated(slice_of("fd00::1", name="six", ports=slice_ports)))
    assert made.affinity.unkept_lists(Key("ns", "web"), 5) == 2 * 2 + 2 * 1
    assert made.affinity.unkept_lists(Key("ns", "web"), 6) == 0


def test_an_older_service_comes_first() -> None:
    """A new one takes affinity from none that has it; among equals the name decides."""
    made = cluster(
        events_of(sticky("z", 1.0), 3), events_of(sticky("a", 2.0), 3), events_of(sticky("b", 2.0), 3)
    )
    assert unkept(made, 8) == {"b"}
    assert unkept(made, 5) == {"a", "b"}


def test_a_service_that_is_too_large_takes_nothing_from_later_ones() -> None:
    made = cluster(events_of(sticky("large", 1.0), 9), events_of(sticky("small", 2.0), 3))
    assert unkept(made, 8) == {"large"}


def test_no_service_loses_affinity_because_of_another_namespace() -> None:
    """Not even of a thousand older ones."""
    mine = cluster(events_of(sticky("web", 2.0), 3))
    assert unkept(mine, 3) == set()
    for number in range(1000):
        other = msgspec.structs.replace(sticky("web", 1.0), namespace=f"other{number}")
        for event in events_of(other, 9):
            assert Key("ns", "web") not in mine.apply(event)
    assert mine.affinity.unkept_lists(Key("ns", "web"), 3) == 0
    assert mine.affinity.unkept_lists(Key("other0", "web"), 3) == 9


@pytest.mark.parametrize(
    "fields",
    [
        {"headless": True, "cluster_ips": ()},
        {"type": "ExternalName"},
        {"proxy_name": "other"},
        {"cluster_ips": ()},
        {"cluster_ips": ("fd00:96::10",)},
        {"affinity_seconds": None},
    ],
)
def test_a_service_without_such_rules_takes_no_part(fields: dict[str, object]) -> None:
    first = msgspec.structs.replace(sticky("a", 1.0), **fields)
    made = cluster(events_of(first, 3), events_of(sticky("b", 2.0), 3))
    assert unkept(made, 3) == set()


def test_readiness_and_the_node_change_nothing() -> None:
    """All nodes agree, and an endpoint that is ready in turns moves no affinity."""
    made = cluster(events_of(sticky("a", 1.0), 3), events_of(sticky("b", 2.0), 3))
    assert unkept(made, 5) == {"b"}
    endpoints = [endpoint(f"10.0.0.{n}", ready=n > 1, node_name="n2", zone_hints=("x",)) for n in (1, 2, 3)]
    assert made.apply(Updated(slice_of(*endpoints, service="a"))).keys() == {Key("ns", "a")}
    assert unkept(made, 5) == {"b"}


def objects_of(changes: ChangedServices) -> Mapping[Key, Mapping[Family, int]]:
    return {
        key: {family: count for family in Family if (count := change.objects({family}))}
        for key, change in changes.items()
    }


def test_services_that_keep_or_lose_affinity_count_as_changed() -> None:
    """In all their families, because one endpoint decides for both. Others of the namespace do not."""
    first = events_of(sticky("a", 1.0, **BOTH), 2)
    made = cluster(first, events_of(sticky("b", 2.0, **BOTH), 3), events_of(sticky("c", 3.0), 1))
    assert unkept(made, 6) == set()
    assert objects_of(made.apply(slice_for("a", 3))) == {
        Key("ns", "a"): {Family.IPV4: 1},
        Key("ns", "c"): {Family.IPV4: 1},
    }
    assert objects_of(made.apply(slice_for("a", 7))) == {
        Key("ns", "a"): {Family.IPV4: 1, Family.IPV6: 1},
        Key("ns", "c"): {Family.IPV4: 1},
    }
    assert unkept(made, 6) == {"a"}
    assert made.apply(Deleted(Kind.SERVICE, Key("ns", "b"))).keys() == {Key("ns", "b")}
    assert made.apply(slice_for("a", 6)).keys() == {Key("ns", "a"), Key("ns", "c")}


def test_a_list_of_all_objects_decides_once_for_each_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event of another namespace, of a Service without affinity or without new endpoints decides nothing."""
    names = [f"s{number}" for number in range(300)]
    made = Cluster()
    made.apply(Listed(Kind.SERVICE, tuple(map(sticky, names))))
    made.apply(Listed(Kind.ENDPOINT_SLICE, tuple(slice_for(it, 1).object for it in names)))
    assert len(unkept(made, 10)) == 290
    decided: list[int] = []

    def counting_decide(*arguments: Any) -> Any:
        decided.append(1)
        return kept_claims(*arguments)

    monkeypatch.setattr("pykubeproxy.services.cluster.kept_claims", counting_decide)
    made.apply(Listed(Kind.ENDPOINT_SLICE, tuple(slice_for(it, 2).object for it in names)))
    assert len(decided) == 1
    assert len(unkept(made, 10)) == 295
    made.apply(Updated(slice_of(endpoint("10.0.0.1", ready=False), "10.0.0.9", service="s0")))
    made.apply(Updated(service("plain")))
    for event in events_of(msgspec.structs.replace(sticky(), namespace="other"), 3):
        made.apply(event)
    assert len(decided) == 1


@settings(max_examples=100, deadline=None)
@given(some=st.lists(events(), max_size=30), limit=st.integers(1, 6))
def test_answers_follow_from_the_objects_and_changes_are_told(some: list[Event], limit: int) -> None:
    """In any order of events: the same answers as for a new cluster, and each other answer is among the changes."""
    made = Cluster()
    for event in some:
        before = {it.key: bool(made.affinity.unkept_lists(it.key, limit)) for it in made.services()}
        changes: ChangedServices = made.apply(event)
        fresh = Cluster()
        fresh.apply(Listed(Kind.SERVICE, tuple(made.services())))
        slices = (it for one in made.services() for it in made.all_slices_of(one.key))
        fresh.apply(Listed(Kind.ENDPOINT_SLICE, tuple(slices)))
        for key in (it.key for it in made.services()):
            now = made.affinity.unkept_lists(key, limit)
            assert now == fresh.affinity.unkept_lists(key, limit)
            assert key in changes or bool(now) is before[key]
