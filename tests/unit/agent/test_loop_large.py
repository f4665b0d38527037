"""How the reconcile loop syncs large Services apart from the others."""

import re
from itertools import pairwise

import msgspec
import pytest

from pykubeproxy.agent.pending import Budget
from pykubeproxy.objects import EndpointPort, Kind, Listed, Protocol, Updated
from pykubeproxy.rules.names import cluster_chain
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.ports import PortName
from tests.fakes.iptables import fail_on
from tests.fakes.loop import HERE, STARTED, STOP, WEB, Loop, at
from tests.objects import service, slice_of

pytestmark = pytest.mark.usefixtures("no_kernel")


def test_a_large_service_delays_no_small_one(loop: Loop) -> None:
    """It is synced on its own, and then waits three times as long as that took."""
    loop.family.limit(Budget(2, 2))
    synced: list[tuple[float, set[str]]] = []

    def slow(text: str) -> None:
        names_written = set(re.findall(r"ns/(web|large):http -> ", text))
        synced.append((loop.now, names_written))
        if "large" in names_written:
            loop.clock.now += 2.0

    loop.live.on_restore = slow
    large = service("large", cluster_ip="10.96.0.11")
    small = [Updated(slice_of(f"10.244.1.{5 + n}")) for n in range(4)]
    changes = [Updated(slice_of(*(f"10.244.2.{k}" for k in range(3 + n)), service="large")) for n in range(9)]
    steps = [step for n, change in enumerate(changes) for step in at(10.5 + n, change)]
    steps += [step for n, change in enumerate(small) for step in at(10 + 2 * n, change)]
    loop.run(*STARTED, *at(5, Updated(large)), *steps, *at(30, STOP))
    turns = [when for when, services in synced if services == {"large"}]
    assert [after - before for before, after in pairwise(turns)] == [8.0, 8.0][: len(turns) - 1]
    assert len(turns) >= 2
    assert not any(len(services) > 1 for _, services in synced)


def test_a_dead_endpoint_of_a_large_service_leaves_at_once(loop: Loop) -> None:
    """Also while the Service waits after a long turn, and the new endpoints wait on."""
    loop.family.limit(Budget(2, 2))
    seen: dict[float, set[str]] = {}

    def slow(text: str) -> None:
        loop.clock.now += 2.0 if "large" in text else 0.0

    def look() -> None:
        rules = "\n".join(rule for chain in loop.live.tables["nat"].values() for rule in chain)
        seen[loop.now] = set(re.findall(r"--to-destination 10\.244\.2\.(\d)", rules))

    loop.live.on_restore, loop.live.restored = slow, look
    large = Updated(service("large", cluster_ip="10.96.0.11"))
    grown, replaced = (
        Updated(slice_of(*(f"10.244.2.{n + it}" for n in range(1, 4)), service="large")) for it in (0, 1)
    )
    change = Updated(slice_of("10.244.1.9"))
    loop.run(*STARTED, *at(10, large, grown), *at(14, replaced, change), *at(30, STOP))
    assert seen[12.0] == {"1", "2", "3"}
    assert seen[16.0] == {"2", "3"}
    assert next(when for when, hosts in seen.items() if "4" in hosts) == 20.0


def test_a_change_waits_for_a_turn_or_the_next_sync_not_for_both(loop: Loop) -> None:
    """A turn that takes longer than the pause between syncs begins with that pause, not within it."""
    loop.family.limit(Budget(2, 2))
    written: dict[int, float] = {}
    turns = []

    def slow(text: str) -> None:
        for port in re.findall(r"--to-destination 10\.244\.1\.9:(\d+)", text):
            written.setdefault(int(port), loop.now)
        if "--to-destination 10.244.2." in text:
            turns.append(loop.clock.now)
            loop.clock.now += 2.3

    loop.live.on_restore = slow
    large = [Updated(slice_of(*(f"10.244.2.{n + it}" for it in range(3)), service="large")) for n in range(9)]
    steps = at(5, Updated(service("large", cluster_ip="10.96.0.11")))
    for n, change in enumerate(large):
        steps += at(10 + 5 * n, change)
    changed = {8001 + n: 10 + 0.7 * n for n in range(80)}
    for port, when in changed.items():
        steps += at(when, Updated(slice_of("10.244.1.9", ports=(EndpointPort("http", Protocol.TCP, port),))))
    loop.run(*STARTED, *steps, *at(80, STOP))
    assert len(turns) > 4
    # A sync also serves the changes before the one that it writes.
    waits = [min(then for it, then in written.items() if it >= port) - when for port, when in changed.items()]
    assert max(waits) <= 2.3


def test_once_syncs_large_services_too(loop: Loop) -> None:
    loop.family.limit(Budget(0, 0))
    assert loop.run(*STARTED, *at(20, STOP), once=True) == 0
    assert loop.rules(WEB)


def test_once_syncs_large_services_after_a_failing_one(loop: Loop) -> None:
    loop.family.limit(Budget(0, 0))
    loop.live.on_restore = fail_on("10.244.2.1:")
    services = Listed(Kind.SERVICE, (service(), service("failing", cluster_ip="10.96.0.11")))
    slices = Listed(Kind.ENDPOINT_SLICE, (slice_of("10.244.1.5"), slice_of("10.244.2.1", service="failing")))
    lists = at(1, services, slices, Listed(Kind.NODE, (HERE,)))
    assert loop.run(*lists, *at(20, STOP), once=True) == 1
    assert loop.rules(WEB)


def test_a_failing_large_service_causes_ever_fewer_syncs(loop: Loop) -> None:
    """After each failure, the agent goes through all Services."""
    loop.family.limit(Budget(2, 2))
    failed: list[float] = []
    loop.live.on_restore = fail_on("10.244.1.66:", note=lambda: failed.append(loop.now))
    change = Updated(slice_of("10.244.1.66", "10.244.1.67", "10.244.1.68"))
    loop.run(*STARTED, *at(10, change), *at(130, STOP))
    assert failed == [10, 11, 13, 17, 25, 41, 71, 101]


def test_endless_losses_keep_no_large_service_of_others_waiting(loop: Loop) -> None:
    """A tenant's large Services leave external IPs faster than the agent removes them."""
    loop.family.limit(Budget(2, 2))

    def slow(text: str) -> None:
        loop.clock.now += 1.0 if "ns/hostile" in text else 0.0

    loop.live.on_restore = slow
    names = [f"hostile{number}" for number in range(8)]
    hosts = ("10.244.2.1", "10.244.2.2", "10.244.2.3")

    def hostile(turn: int) -> list[Updated]:
        ips = (f"192.0.2.{turn}",)
        return [
            Updated(service(name, cluster_ip=f"10.96.1.{number}", external_ips=ips))
            for number, name in enumerate(names)
        ]

    slices = [Updated(slice_of(*hosts, service=name)) for name in names]
    endless = [step for turn in range(160) for step in at(40 + turn / 2, *hostile(turn))]
    victim = (
        Updated(msgspec.structs.replace(made, namespace="other"))
        for made in (service("victim", cluster_ip="10.96.0.11"), slice_of(*hosts, service="victim"))
    )
    loop.run(*STARTED, *at(5, *hostile(0), *slices), *endless, *at(60, *victim), *at(119, STOP))
    chain = cluster_chain(PortName("other", "victim", "http", "TCP"))
    assert loop.rules(ChainKey("nat", chain))


def test_a_failing_loss_delays_no_other(loop: Loop) -> None:
    """Of another tenant, long after the first one began to fail."""
    loop.family.limit(Budget(2, 2))
    failing = Updated(service("failing", cluster_ip="10.96.0.11"))
    other = Updated(msgspec.structs.replace(service("other", cluster_ip="10.96.0.12"), namespace="other"))

    def pods(name: str, namespace: str, *hosts: int) -> Updated:
        made = slice_of(*(f"10.244.{2 + len(namespace)}.{n}" for n in hosts), service=name)
        return Updated(msgspec.structs.replace(made, namespace=namespace))

    def fail() -> None:
        loop.live.on_restore = fail_on("ns/failing:http")

    first = (failing, other, pods("failing", "ns", 1, 2, 3, 4), pods("other", "other", 1, 2, 3, 4))
    lost: list[float] = []

    def look() -> None:
        rules = "\n".join(rule for chain in loop.live.tables["nat"].values() for rule in chain)
        if "10.244.7.1:" not in rules:
            lost.append(loop.now)

    loop.live.restored = look
    fewer = (*at(21, pods("failing", "ns", 2, 3, 4)), *at(55.2, pods("other", "other", 2, 3, 4)))
    loop.run(*STARTED, *at(10, *first), (20, fail), *fewer, *at(90, STOP))
    assert next(when for when in lost if when > 20) < 57


def test_losses_that_fail_are_tried_ever_less_often(loop: Loop) -> None:
    """So is the turn that follows them."""
    loop.family.limit(Budget(2, 2))
    failed: list[float] = []
    large = Updated(service("large", cluster_ip="10.96.0.11"))
    first, fewer = (
        Updated(slice_of(*(f"10.244.2.{n}" for n in hosts), service="large"))
        for hosts in ((1, 2, 3, 4), (2, 3, 4))
    )

    def fail() -> None:
        loop.live.on_restore = fail_on("-A KUBE-SVC", note=lambda: failed.append(loop.now))

    loop.run(*STARTED, *at(10, large, first), (20, fail), *at(21, fewer), *at(60, STOP))
    waits = [after - before for before, after in pairwise(dict.fromkeys(failed))]
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]
