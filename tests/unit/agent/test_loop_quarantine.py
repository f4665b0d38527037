"""When the reconcile loop retries quarantined Services, and Services that claim the API server's address."""

import math
import re
from collections.abc import Collection
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent import bisect, coverage, quarantine
from pykubeproxy.agent.bisect import BisectResult
from pykubeproxy.agent.tables import FamilyTables
from pykubeproxy.agent.work import Work
from pykubeproxy.kernel import Backend
from pykubeproxy.objects import EndpointPort, Port, Protocol, Updated
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName
from tests.fakes.loop import STARTED, STOP, WEB, Loop, at
from tests.objects import numbered, service, slice_of

pytestmark = pytest.mark.usefixtures("no_kernel")


def note_retries(loop: Loop) -> list[float]:
    """Return when ports are retried; each retry takes a moment."""
    retries: list[float] = []
    retry = loop.family.tables.retry_quarantined

    def noted(cluster: Cluster, ports: Collection[PortName]) -> BisectResult:
        retries.append(loop.clock.now)
        loop.clock.now += 0.001
        return retry(cluster, ports)

    loop.family.tables.retry_quarantined = noted  # type: ignore[method-assign]
    return retries


def test_a_quarantined_port_that_no_longer_exists_is_not_retried_in_vain(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large Service keeps its rules, and its quarantine, until its turn."""
    monkeypatch.setattr(coverage, "LARGE_PAIRS", 2)
    monkeypatch.setattr(Work, "_turn_due", lambda _: math.inf)
    loop.live.rejects = lambda rule: "--to-destination 10.244.1.66:" in rule
    retries = note_retries(loop)
    ports = (EndpointPort("renamed", Protocol.TCP, 8080),)
    changed = (
        Updated(slice_of("10.244.1.66", "10.244.1.67", "10.244.1.68", ports=ports)),
        Updated(service(ports=(Port("renamed", Protocol.TCP, 80),))),
    )
    loop.run(
        *STARTED,
        *at(10, Updated(slice_of("10.244.1.66"))),
        *at(15, *changed),
        *at(20, STOP),
    )
    assert retries == [1011.0, 1015.0]


def test_a_large_service_quarantined_in_its_turn_is_retried_within_an_hour(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hour begins with its own sync; no other sync follows."""
    monkeypatch.setattr(coverage, "LARGE_PAIRS", 2)
    loop.live.rejects = lambda rule: "--to-destination 10.244.1.66:" in rule
    retries = note_retries(loop)
    changed = Updated(slice_of("10.244.1.66", "10.244.1.67", "10.244.1.68"))
    loop.run(*STARTED, *at(10, changed), *at(3700, STOP))
    assert retries == [4610.0]


def test_a_search_that_ran_out_of_time_continues_at_once(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """One try follows the other, until only the rejected Service is quarantined, and reported.

    On legacy, because there iptables does not name the rejected line.
    """
    loop.live.backend = Backend.LEGACY
    loop.family.tables = FamilyTables(loop.live, None)
    for name in ("SEARCH_SECONDS", "RETRY_SECONDS"):
        monkeypatch.setattr(quarantine, name, 0.0)
    loop.live.rejects = lambda rule: "--to-destination 10.244.0.8:" in rule
    seen: list[list[str]] = []
    loop.observers.sync_succeeded.side_effect = lambda report, _: seen.append(
        [f"{it.name} {it.tried}" for it in report.quarantined]
    )
    loop.run(*STARTED, *at(10, *numbered(*range(1, 10))), *at(60, STOP))
    assert len(seen[1]) > 1
    assert all(line.endswith("False") for line in seen[1])
    assert seen[-1] == ["svc8 True"]
    assert max(map(len, seen)) == len(seen[1])


def test_nearly_all_innocent_services_are_served_within_a_minute_however_slow_iptables_is(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 1000 new Services, of which iptables-legacy rejects 6, and 1.2 s for each commit of table nat.

    As each only says yes or no, to find 6 among 1000 takes 50 commits at least, a minute. Half of the time is for others.
    """
    loop.live.backend = Backend.LEGACY
    loop.family.tables = FamilyTables(loop.live, None)
    for module in (bisect, quarantine):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=loop.clock, time=loop.clock))
    rejected = re.compile(r"--to-destination 10\.244\.(?:0\.(?:7|130|131)|1\.194|3\.(?:50|249)):")
    loop.live.rejects = lambda rule: bool(rejected.search(rule))
    unserved: dict[float, int] = {}

    def slow(text: str) -> None:
        loop.clock.now += 1.2 if "*nat\n" in text else 0.0

    def count() -> None:
        chains = loop.live.tables.get("nat", {}).values()
        entries = sum(
            ' cluster IP" ' in rule and "-j KUBE-SVC-" in rule for rules in chains for rule in rules
        )
        unserved[loop.clock.now - 1010] = 1001 - 6 - entries

    loop.live.on_restore, loop.live.restored = slow, count
    loop.run(*STARTED, *at(10, *numbered(*range(1, 1001))), *at(400, STOP))
    assert min(number for when, number in unserved.items() if when < 60) < 50
    assert min(when for when, number in unserved.items() if not number) < 120


def test_a_quarantined_service_is_retried_after_others_are_served(loop: Loop) -> None:
    """A second after its change; its rules are written with the sync that follows."""
    loop.live.rejects = lambda rule: "--to-destination 10.244.1.66:" in rule
    steps = (
        *at(10, Updated(slice_of("10.244.1.66"))),
        *at(15, Updated(slice_of("10.244.1.67"))),
        *at(16, STOP),
    )
    loop.run(*STARTED, *steps)
    assert loop.family.tables.quarantined() == ()
    assert loop.rules(WEB)


def test_a_failing_retry_is_logged(loop: Loop) -> None:
    """And repeated, not at once."""
    loop.live.rejects = lambda rule: "--to-destination 10.244.1.66:" in rule
    steps = (
        *at(10, Updated(slice_of("10.244.1.66"))),
        (11, loop.break_),
        *at(15, Updated(slice_of("10.244.1.67"))),
        *at(100, STOP),
    )
    with capture_logs() as logged:
        loop.run(*STARTED, *steps)
    assert 0 < [line["event"] for line in logged].count("quarantine retry failed") < 10


def test_a_new_address_of_the_api_server_is_no_longer_served(loop: Loop) -> None:
    """Even if the agent hears nothing more, because a Service redirects that address."""
    known: set[tuple[str, int]] = set()
    claiming = (Updated(service(external_ips=("203.0.113.7",))), Updated(slice_of("10.244.1.5")))
    served: list[bool] = []

    def note() -> None:
        rules = (rule for chain in loop.live.save().chains.values() for rule in chain)
        served.append(any("203.0.113.7" in rule for rule in rules))

    steps: list[tuple[float, object]] = [(10, note), (11, lambda: known.add(("203.0.113.7", 80))), (45, note)]
    loop.run(
        *STARTED,
        *at(2, *claiming),
        *steps,
        *at(50, STOP),
        api_servers=lambda: frozenset(known),
    )
    assert served == [True, False]
