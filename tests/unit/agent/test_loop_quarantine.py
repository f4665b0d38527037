"""When the reconcile loop retries quarantined Services, and Services that claim the API server's address."""

import re
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent.notices import Notice, SyncReport
from pykubeproxy.agent.pending import Budget
from pykubeproxy.agent.tables import FamilyTables, Tried
from pykubeproxy.kernel import Backend, Failed
from pykubeproxy.objects import EndpointPort, Kind, Listed, Port, Protocol, Updated
from pykubeproxy.services.cluster import Cluster
from tests.fakes.iptables import fail_on
from tests.fakes.loop import HERE, LISTS, STARTED, STOP, WEB, Loop, at
from tests.objects import numbered, service, slice_of

pytestmark = pytest.mark.usefixtures("no_kernel")


def note_tries(loop: Loop) -> list[tuple[float, bool]]:
    """Return when service ports are tried, and whether they are suspect; each try takes a moment."""
    tries: list[tuple[float, bool]] = []
    tables, try_next = loop.family.tables, loop.family.tables.try_next

    def noted(cluster: Cluster) -> Tried:
        if tables.quarantine.has_tries:
            tries.append((loop.clock.now, bool(tables.quarantine.held())))
        loop.clock.now += 0.001
        return try_next(cluster)

    tables.try_next = noted  # type: ignore[method-assign]
    return tries


def note_retries(loop: Loop) -> Callable[[], list[float]]:
    """Return a function that returns when quarantined ports were retried."""
    tries = note_tries(loop)
    return lambda: [when for when, is_suspect in tries if not is_suspect]


def test_a_quarantined_port_that_no_longer_exists_is_not_retried_in_vain(loop: Loop) -> None:
    """It leaves quarantine with what its waiting Service has lost."""
    loop.family.limit(Budget(2, 2))
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
    assert not retries()
    assert {it.port_name.port for it in loop.family.tables.quarantined()} == {"renamed"}


def test_a_large_service_quarantined_in_its_turn_is_retried_within_an_hour(loop: Loop) -> None:
    """The hour begins with its own sync; no other sync follows."""
    loop.family.limit(Budget(2, 2))
    loop.live.rejects = lambda rule: "--to-destination 10.244.1.66:" in rule
    retries = note_retries(loop)
    changed = Updated(slice_of("10.244.1.66", "10.244.1.67", "10.244.1.68"))
    loop.run(*STARTED, *at(10, changed), *at(3700, STOP))
    assert [round(when) for when in retries()] == [4610]


def on_legacy(loop: Loop) -> None:
    """Let iptables not name the line that it rejects."""
    loop.live.backend = Backend.LEGACY
    loop.family.tables = FamilyTables(loop.live, None)


def test_a_search_goes_on_until_the_rejected_service_is_found(loop: Loop) -> None:
    """One try follows the other, and the number of suspect Services falls."""
    on_legacy(loop)
    loop.live.rejects = lambda rule: "--to-destination 10.244.0.8:" in rule
    loop.run(*STARTED, *at(10, *numbered(*range(1, 10))), *at(60, STOP))
    seen = [(it.held, [port.name for port in it.quarantined]) for it in loop.told(SyncReport)]
    assert seen[1] == (9, [])
    held = [number for number, _ in seen[1:]]
    assert held == sorted(held, reverse=True)
    assert seen[-1] == (0, ["svc8"])


def test_drift_and_changes_do_not_wait_for_a_search(loop: Loop) -> None:
    """Not longer than for one try."""
    on_legacy(loop)
    loop.live.rejects = lambda rule: "--to-destination 10.244.0." in rule and "7:8080" in rule
    served: list[tuple[float, bool]] = []

    def slow(text: str) -> None:
        loop.clock.now += 1.0 if "*nat\n" in text else 0.0

    def note() -> None:
        rules = [rule for rules in loop.live.tables.get("nat", {}).values() for rule in rules]
        served.append((loop.clock.now - 1000, any("10.244.1.9:" in rule for rule in rules)))

    loop.live.on_restore, loop.live.restored = slow, note
    change = Updated(slice_of("10.244.1.9"))
    loop.run(*STARTED, *at(10, *numbered(*range(1, 60))), *at(40, change), *at(90, STOP))
    assert next(when for when, is_served in served if is_served) < 44
    assert len(loop.family.tables.quarantine.held()) < 59


def test_no_try_follows_a_failed_first_sync(loop: Loop) -> None:
    """It would know nothing of the rules of an earlier agent."""
    loop.live.rejects = lambda rule: "--to-destination 10.244.0.8:" in rule
    loop.live.on_restore = fail_on("svc1:", Failed("iptables-restore", 1, "out of memory"), times=2)
    tries = note_tries(loop)
    loop.run(*at(1, *LISTS, Listed(Kind.NODE, (HERE,)), *numbered(*range(1, 10))), *at(60, STOP))
    synced = [name for name in loop.trail if name in ("SyncFailure", "SyncReport")]
    assert synced[:2] == ["SyncFailure", "SyncFailure"]
    assert len(tries) == 2  # after the first success, which held it back
    assert [it.name for it in loop.family.tables.quarantined()] == ["svc8"]


def test_once_ends_with_the_search(loop: Loop) -> None:
    on_legacy(loop)
    loop.live.rejects = lambda rule: "--to-destination 10.244.0.8:" in rule
    steps = at(1, *LISTS, Listed(Kind.NODE, (HERE,)), *numbered(*range(1, 10)))
    assert loop.run(*steps, once=True) == 0
    assert [it.name for it in loop.family.tables.quarantined()] == ["svc8"]
    assert len(loop.family.tables.services()) == 10


def test_once_ends_if_the_search_fails(loop: Loop) -> None:
    on_legacy(loop)
    loop.live.rejects = lambda rule: "--to-destination 10.244.0.8:" in rule

    def fail(notice: Notice) -> None:
        if isinstance(notice, SyncReport):
            loop.break_()

    loop.on_notice = fail
    steps = at(1, *LISTS, Listed(Kind.NODE, (HERE,)), *numbered(*range(1, 10)))
    assert loop.run(*steps, once=True) == 1


def test_nearly_all_innocent_services_are_served_within_a_minute_however_slow_iptables_is(loop: Loop) -> None:
    """With 1000 new Services, of which iptables-legacy rejects 6, and 1.2 s for each commit of table nat.

    As each only says yes or no, to find 6 among 1000 takes 50 commits at least, a minute.
    """
    on_legacy(loop)
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
