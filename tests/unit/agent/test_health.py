"""The health of the agent, and the pages /healthz, /livez and /readyz."""

import inspect
import json
from typing import Any, cast

import msgspec
import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent.mailbox import Mailbox, Stop
from pykubeproxy.agent.notices import DriftRepaired, EventApplied, RulesMissing, SyncFailure
from pykubeproxy.agent.observe.health import HUNG_AFTER, Health, Heartbeat, health_pages, timestamp
from pykubeproxy.kernel import Iptables, runner
from pykubeproxy.objects import Family, Node, Updated
from pykubeproxy.sources import Outage, Watch
from tests.fakes.http_client import TRANSPORT, Response, fetch, recorded_response
from tests.reports import report
from tests.unit.agent.conftest import Serve

SYNC_PERIOD = 30.0
START = 1_795_218_838_074_678_960
NODE = Node("node1", ("192.168.99.10",))
DOOMED = Node("node1", taints=("ToBeDeletedByClusterAutoscaler",))


class Time:
    """A clock that only `pass_` advances, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def pass_(self, seconds: float) -> None:
        self.seconds += seconds

    def __call__(self) -> float:
        return self.seconds

    def wall(self) -> int:
        return START + int(self.seconds * 1e9)


class Setting:
    """The health of a node with both families, and a server of its pages."""

    def __init__(self, serve: Serve, needs_node: bool = True) -> None:
        self.time = Time()
        self.heartbeat, self.mailbox = Heartbeat(self.time), Mailbox(self.time)
        self.health = Health(
            Family,
            SYNC_PERIOD,
            needs_node,
            self.mailbox.waiting_since,
            self.heartbeat.hung,
            clock=self.time,
            wall_clock=self.time.wall,
        )
        self.counted: list[tuple[str, int]] = []
        self._port = serve(
            health_pages(self.health, lambda name, status: self.counted.append((name, status)))
        )

    def sync(self) -> None:
        for family in Family:
            self.health.notice(report(family=family))

    def ask(self, name: str, method: str = "GET") -> Response:
        return fetch(self._port, f"/{name}", method)

    def content(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.ask(name).body)
        return content

    def statuses(self) -> tuple[int, int, int]:
        """Return the statuses of /healthz, /livez and /readyz."""
        return self.ask("healthz").status, self.ask("livez").status, self.ask("readyz").status


@pytest.fixture
def node(serve: Serve) -> Setting:
    """A known node whose families are synced."""
    setting = Setting(serve)
    setting.health.notice(EventApplied(Updated(NODE), {}, NODE))
    setting.sync()
    return setting


def test_a_hung_loop_fails_all_pages(node: Setting) -> None:
    """After 90 s in one step; the log says where it hangs, once."""
    node.heartbeat.progress()
    node.time.pass_(90)
    assert node.statuses() == (200, 200, 200)
    node.time.pass_(0.1)
    with capture_logs() as logs:
        assert node.statuses() == (503, 503, 503)
        assert not node.content("livez")["status"]["IPv4"]["healthy"]
    assert [(entry["event"], entry["seconds"]) for entry in logs] == [("reconcile loop hung", 90)]
    assert ", statuses (test_health.py:" in logs[0]["at"]
    node.heartbeat.progress()
    assert node.statuses() == (200, 200, 200)


def test_a_command_that_hangs_is_no_hang_of_the_loop() -> None:
    """It is killed before the loop counts as hung."""
    limit = inspect.signature(Iptables).parameters["seconds"].default
    assert limit + runner._SECONDS_TO_DIE < HUNG_AFTER


def test_a_long_sync_that_progresses_is_no_hang(node: Setting) -> None:
    for _ in range(20):
        node.heartbeat.progress()
        node.time.pass_(80)
    assert node.statuses() == (200, 200, 200)


def test_an_unhandled_change_is_overdue_after_two_sync_periods(node: Setting) -> None:
    """It counts from its arrival in the mailbox, even if the loop never takes it."""
    node.mailbox.put(Stop(0, ""))
    node.time.pass_(60)
    assert node.statuses() == (200, 200, 200)
    node.time.pass_(0.1)
    assert node.statuses() == (503, 200, 503)
    node.mailbox.take(0)
    assert node.statuses() == (503, 200, 503)
    node.mailbox.handled()
    assert node.statuses() == (200, 200, 200)


def test_any_method_is_a_health_check(node: Setting) -> None:
    """As in kube-proxy; it counts too."""
    for method in ("POST", "OPTIONS", "HEAD", "DELETE"):
        answer = node.ask("healthz", method)
        assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    assert node.counted == [("healthz", 200)] * 4


def test_an_unclean_path_is_redirected(node: Setting) -> None:
    """As in kube-proxy: the client is sent to the page."""
    expected, got = recorded_response("GET :10256/healthz (as //healthz)"), node.ask("/healthz")
    assert (got.status, got.body) == (expected.status, expected.body)
    assert {k: v for k, v in got.headers.items() if k in expected.headers} == expected.headers
    assert node.counted == []


@pytest.mark.parametrize(
    ("title", "eligible"),
    [
        ("GET :10256/healthz", True),
        ("GET :10256/livez", True),
        ("GET :10256/healthz of a node with the taint ToBeDeletedByClusterAutoscaler", False),
        ("GET :10256/livez of a node with the taint ToBeDeletedByClusterAutoscaler", False),
    ],
)
def test_responses_equal_kube_proxys(node: Setting, title: str, eligible: bool) -> None:
    """Status, headers and JSON equal the recorded ones, except for times."""
    if not eligible:
        node.health.notice(EventApplied(Updated(NODE), {}, DOOMED))
    node.time.pass_(5)
    expected, got = recorded_response(title), node.ask("livez" if "livez" in title else "healthz")
    assert got.status == expected.status
    assert {k: v for k, v in got.headers.items() if k not in TRANSPORT | {"Content-Length"}} == {
        k: v for k, v in expected.headers.items() if k != "Content-Length"
    }
    assert _without_times(got.body) == _without_times(expected.body)


def _without_times(body: str) -> str:
    def blank(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: "" if k in ("lastUpdated", "currentTime") else blank(v) for k, v in value.items()}
        return value

    assert msgspec.json.encode(json.loads(body)).decode() == body
    return json.dumps(blank(json.loads(body)))


def test_last_updated(node: Setting) -> None:
    """While healthy, lastUpdated is the current time; each family has the time of its last sync."""
    node.time.pass_(7)
    node.health.notice(report(family=Family.IPV4))
    node.time.pass_(2)
    content = node.content("healthz")
    assert content["currentTime"] == content["lastUpdated"] == timestamp(START + 9_000_000_000)
    assert content["status"]["IPv4"]["lastUpdated"] == timestamp(START + 7_000_000_000)
    assert content["status"]["IPv6"]["lastUpdated"] == timestamp(START)
    node.health.notice(EventApplied(Updated(NODE), {}, DOOMED))
    assert node.content("healthz")["lastUpdated"] == timestamp(START + 7_000_000_000)


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (1_795_218_838_074_678_960, "2026-11-20T23:53:58.07467896Z"),
        (1_795_218_840_000_000_000, "2026-11-20T23:54:00Z"),
        (1_795_218_838_000_000_001, "2026-11-20T23:53:58.000000001Z"),
        (1_795_218_838_500_000_000, "2026-11-20T23:53:58.5Z"),
        (0, "0001-01-01T00:00:00Z"),
    ],
)
def test_timestamps_have_gos_format(ns: int, text: str) -> None:
    """RFC 3339 in UTC without trailing zeros."""
    assert timestamp(ns) == text


def test_an_overdue_sync_is_not_ready_but_alive(node: Setting) -> None:
    """After twice syncPeriod, until it succeeds. A restart would not help against iptables that fails."""
    node.health.notice(SyncFailure(Family.IPV6, False, 0.1, True, "refused"))
    node.time.pass_(30)
    node.health.notice(SyncFailure(Family.IPV6, False, 0.1, True, "refused"))
    node.time.pass_(30)
    assert node.statuses() == (200, 200, 200)
    node.time.pass_(0.001)
    assert node.statuses() == (503, 200, 503)
    for page, ready in (("livez", True), ("readyz", False)):
        content = node.content(page)
        assert (content["healthy"], content["status"]["IPv6"]["healthy"]) == (ready, ready)
        assert content["status"]["IPv4"]["healthy"]
    assert content["lastUpdated"] == timestamp(START)
    node.health.notice(report(family=Family.IPV4))
    assert node.statuses() == (503, 200, 503)
    node.time.pass_(3600)
    assert node.statuses() == (503, 200, 503)
    node.health.notice(report(family=Family.IPV6))
    assert node.statuses() == (200, 200, 200)


def test_failing_lists_are_not_ready_but_healthy(node: Setting) -> None:
    """After a minute, with the reason. Clients still reach the node: all nodes may have such lists."""

    class Lists:
        list_outage: Outage | None = None

    services, slices = Lists(), Lists()
    node.health.watching(cast("list[Watch]", [services, slices]))
    assert "reasons" not in node.content("readyz")
    slices.list_outage = Outage("endpointslices", 60, "the list has no end")
    assert node.statuses() == (200, 200, 200)
    slices.list_outage = Outage("endpointslices", 60.1, "the list has no end")
    assert node.statuses() == (200, 200, 503)
    content = node.content("readyz")
    assert content["reasons"] == ["cannot list endpointslices: the list has no end"]
    assert (content["healthy"], content["status"]["IPv4"]["healthy"]) == (False, True)
    assert node.content("healthz")["healthy"]
    slices.list_outage = None
    assert node.statuses() == (200, 200, 200)


def test_an_idle_agent_stays_healthy(node: Setting) -> None:
    """Without changes, no sync is needed."""
    node.time.pass_(86400)
    assert node.statuses() == (200, 200, 200)


def test_before_the_first_sync_a_node_is_alive_but_not_ready(serve: Serve) -> None:
    """It becomes ready when all families are synced."""
    node = Setting(serve)
    node.health.notice(EventApplied(Updated(NODE), {}, NODE))
    assert node.statuses() == (503, 200, 503)
    assert node.content("healthz")["status"]["IPv4"] == {
        "lastUpdated": "0001-01-01T00:00:00Z",
        "healthy": False,
    }
    for family in Family:
        node.health.notice(SyncFailure(family, False, 0.1, True, "refused"))
    node.health.notice(report(family=Family.IPV4))
    assert node.statuses() == (503, 200, 503)
    # A first sync that keeps failing.
    node.time.pass_(61)
    assert node.statuses() == (503, 200, 503)
    node.health.notice(report(family=Family.IPV6))
    assert node.statuses() == (200, 200, 200)


@pytest.mark.parametrize(
    ("object_", "eligible"),
    [
        (NODE, True),
        (None, False),
        (DOOMED, False),
        (Node("node1", deleting=True), False),
        (Node("node1", taints=("node.kubernetes.io/not-ready",)), True),
    ],
)
def test_only_healthz_depends_on_the_node(node: Setting, object_: Node | None, eligible: bool) -> None:
    """A node that is unknown, tainted or being deleted fails /healthz only."""
    node.health.notice(EventApplied(Updated(NODE), {}, object_))
    assert node.statuses() == (200 if eligible else 503, 200, 200)
    content = node.content("healthz")
    assert (content["nodeEligible"], content["healthy"]) == (eligible, True)
    assert "nodeEligible" not in node.content("livez")
    node.health.notice(EventApplied(Updated(NODE), {}, NODE))
    assert node.statuses() == (200, 200, 200)


def test_without_an_api_server_the_node_may_be_unknown(serve: Serve) -> None:
    """A node that is being deleted still fails."""
    node = Setting(serve, needs_node=False)
    node.sync()
    assert node.statuses() == (200, 200, 200)
    node.health.notice(EventApplied(Updated(NODE), {}, None))
    assert node.statuses() == (200, 200, 200)
    node.health.notice(EventApplied(Updated(NODE), {}, DOOMED))
    assert node.statuses() == (503, 200, 200)


def test_contention_does_not_change_the_health(node: Setting) -> None:
    """Health says whether this node serves; an alert, an event and `status` report contention."""
    node.health.notice(DriftRepaired(Family.IPV4, (), (), 0.1, contested=True))
    assert node.statuses() == (200, 200, 200)
    assert node.health.state().families[Family.IPV4].contested


def test_a_node_without_its_rules_is_not_ready(node: Setting) -> None:
    """After 5 s: most repairs are done within one. A restart would not help."""
    node.health.notice(RulesMissing(Family.IPV4, node.time.seconds))
    node.time.pass_(5)
    assert node.statuses() == (200, 200, 200)
    node.time.pass_(0.1)
    assert node.statuses() == (503, 200, 503)
    # The sync of another change does not restore them.
    node.health.notice(report(family=Family.IPV4))
    assert node.statuses() == (503, 200, 503)
    node.health.notice(RulesMissing(Family.IPV4, None))
    assert node.statuses() == (200, 200, 200)
