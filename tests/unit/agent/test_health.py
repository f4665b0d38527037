"""Health as the loop tells of it and as /healthz, /livez and /readyz answer it."""

import json
from typing import Any

import msgspec
import pytest

from pykubeproxy.agent.observe.health import Health, health_pages, timestamp
from pykubeproxy.objects import Family, Node
from tests.fakes.asking import TRANSPORT, Asked, ask, recorded
from tests.unit.agent.conftest import Serve

SYNC_PERIOD = 30.0
START = 1_795_218_838_074_678_960
NODE = Node("node1", ("192.168.99.10",))
DOOMED = Node("node1", taints=("ToBeDeletedByClusterAutoscaler",))


class Time:
    """A clock that stands still; `pass_` seconds by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def pass_(self, seconds: float) -> None:
        self.seconds += seconds

    def wall(self) -> int:
        return START + int(self.seconds * 1e9)


class Setting:
    """The health of a node with both families, and a server that answers of it."""

    def __init__(self, serve: Serve, needs_node: bool = True) -> None:
        self.time = Time()
        self.health = Health(
            Family, SYNC_PERIOD, needs_node, clock=lambda: self.time.seconds, wall_clock=self.time.wall
        )
        self.counted: list[tuple[str, int]] = []
        self._port = serve(
            health_pages(self.health, lambda name, status: self.counted.append((name, status)))
        )

    def sync(self) -> None:
        for family in Family:
            self.health.synced(family)

    def ask(self, name: str) -> Asked:
        return ask(self._port, f"/{name}")

    def content(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.ask(name).body)
        return content

    def statuses(self) -> tuple[int, int, int]:
        """Of /healthz, /livez and /readyz."""
        return self.ask("healthz").status, self.ask("livez").status, self.ask("readyz").status


@pytest.fixture
def node(serve: Serve) -> Setting:
    """A node that is known, and programmed."""
    setting = Setting(serve)
    setting.health.node(NODE)
    setting.sync()
    return setting


def test_long_work_is_no_reason_for_a_restart(node: Setting) -> None:
    """While a sync gets on, /livez passes however overdue it is; /healthz and /readyz do not."""
    node.health.queued(Family.IPV4)
    node.time.pass_(1000)
    assert node.ask("livez").status == 503
    node.health.at_work(Family.IPV4)
    node.time.pass_(50)
    assert [node.ask(page).status for page in ("livez", "healthz", "readyz")] == [200, 503, 503]
    assert node.content("livez")["status"]["IPv4"]["healthy"]
    assert not node.content("readyz")["status"]["IPv4"]["healthy"]
    node.time.pass_(20)
    assert node.ask("livez").status == 503


@pytest.mark.parametrize(
    ("title", "eligible"),
    [
        ("GET :10256/healthz", True),
        ("GET :10256/livez", True),
        ("GET :10256/healthz of a node with the taint ToBeDeletedByClusterAutoscaler", False),
        ("GET :10256/livez of a node with the taint ToBeDeletedByClusterAutoscaler", False),
    ],
)
def test_the_answer_is_kube_proxys(node: Setting, title: str, eligible: bool) -> None:
    """Status, headers and JSON are those recorded: names, order, spacing, all values but the times."""
    if not eligible:
        node.health.node(DOOMED)
    node.time.pass_(5)
    wanted, got = recorded(title), node.ask("livez" if "livez" in title else "healthz")
    assert got.status == wanted.status
    assert {k: v for k, v in got.headers.items() if k not in TRANSPORT | {"Content-Length"}} == {
        k: v for k, v in wanted.headers.items() if k != "Content-Length"
    }
    assert _without_times(got.body) == _without_times(wanted.body)


def _without_times(body: str) -> str:
    def blank(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: "" if k in ("lastUpdated", "currentTime") else blank(v) for k, v in value.items()}
        return value

    assert msgspec.json.encode(json.loads(body)).decode() == body
    return json.dumps(blank(json.loads(body)))


def test_times_are_what_they_claim(node: Setting) -> None:
    """While all is well lastUpdated is now; each family tells when its rules were last brought up to date."""
    node.time.pass_(7)
    node.health.synced(Family.IPV4)
    node.time.pass_(2)
    content = node.content("healthz")
    assert content["currentTime"] == content["lastUpdated"] == timestamp(START + 9_000_000_000)
    assert content["status"]["IPv4"]["lastUpdated"] == timestamp(START + 7_000_000_000)
    assert content["status"]["IPv6"]["lastUpdated"] == timestamp(START)
    node.health.node(DOOMED)
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
def test_timestamps_are_written_as_in_go(ns: int, text: str) -> None:
    """RFC 3339 in UTC with as many digits as are needed."""
    assert timestamp(ns) == text


def test_a_change_that_waits_too_long_is_ill_health(node: Setting) -> None:
    """A family with a change queued for more than twice syncPeriod makes everything fail, until it is synced."""
    node.health.queued(Family.IPV6)
    node.time.pass_(30)
    node.health.queued(Family.IPV6)
    node.time.pass_(30)
    assert node.statuses() == (200, 200, 200)
    node.time.pass_(0.001)
    assert node.statuses() == (503, 503, 503)
    content = node.content("livez")
    assert (
        content["healthy"],
        content["status"]["IPv4"]["healthy"],
        content["status"]["IPv6"]["healthy"],
    ) == (
        False,
        True,
        False,
    )
    assert content["lastUpdated"] == timestamp(START)
    node.health.synced(Family.IPV4)
    assert node.statuses() == (503, 503, 503)
    node.health.synced(Family.IPV6)
    assert node.statuses() == (200, 200, 200)


def test_another_sync_period_counts_at_once(node: Setting) -> None:
    """Also for a change that is queued already."""
    node.health.queued(Family.IPV4)
    node.time.pass_(45)
    assert node.statuses() == (200, 200, 200)
    node.health.adjust(20)
    assert node.statuses() == (503, 503, 503)
    node.health.adjust(60)
    assert node.statuses() == (200, 200, 200)


def test_idleness_is_health(node: Setting) -> None:
    """Without any change there is nothing to sync, for however long."""
    node.time.pass_(86400)
    assert node.statuses() == (200, 200, 200)


def test_before_the_first_sync_a_node_is_alive_but_not_ready(serve: Serve) -> None:
    """No balancer is to send clients before all families are programmed; a restart would not help at first."""
    node = Setting(serve)
    node.health.node(NODE)
    assert node.statuses() == (503, 200, 503)
    assert node.content("healthz")["status"]["IPv4"] == {
        "lastUpdated": "0001-01-01T00:00:00Z",
        "healthy": False,
    }
    for family in Family:
        node.health.queued(family)
    node.health.synced(Family.IPV4)
    assert node.statuses() == (503, 200, 503)
    # A first sync that keeps failing.
    node.time.pass_(61)
    assert node.statuses() == (503, 503, 503)
    node.health.synced(Family.IPV6)
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
def test_only_healthz_asks_for_the_node(node: Setting, object_: Node | None, eligible: bool) -> None:
    """A node that is not known or going away gets no traffic from balancers; the proxy on it is well."""
    node.health.node(object_)
    assert node.statuses() == (200 if eligible else 503, 200, 200)
    content = node.content("healthz")
    assert (content["nodeEligible"], content["healthy"]) == (eligible, True)
    assert "nodeEligible" not in node.content("livez")
    node.health.node(NODE)
    assert node.statuses() == (200, 200, 200)


def test_without_an_api_server_no_node_need_be_known(serve: Serve) -> None:
    """With manifests there may be no Node at all; one that is going counts as ever."""
    node = Setting(serve, needs_node=False)
    node.sync()
    assert node.statuses() == (200, 200, 200)
    node.health.node(None)
    assert node.statuses() == (200, 200, 200)
    node.health.node(DOOMED)
    assert node.statuses() == (503, 200, 200)


def test_answers_are_counted(node: Setting) -> None:
    """Each page tells who counts how it answered."""
    node.health.node(DOOMED)
    node.statuses()
    assert node.counted == [("healthz", 503), ("livez", 200), ("readyz", 200)]


def test_a_contested_family_is_alive_but_not_ready(node: Setting) -> None:
    """A restart would not help, but balancers had better send their clients elsewhere."""
    node.health.contested(Family.IPV4, whether=True)
    assert [node.ask(page).status for page in ("livez", "readyz", "healthz")] == [200, 503, 503]
    assert node.content("readyz")["status"]["IPv4"]["healthy"] is False
    assert node.content("livez")["status"]["IPv4"]["healthy"] is True
    node.health.contested(Family.IPV4, whether=False)
    assert node.ask("readyz").status == 200
