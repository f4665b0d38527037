"""The status page: contents, escaping, and layout in a browser."""

import html
import re
import struct
from pathlib import Path

import pytest

from pykubeproxy import http
from pykubeproxy.agent.observe.status_html import status_page
from pykubeproxy.pages.status_text import health
from pykubeproxy.pages.statusz import (
    AgentStatus,
    EndpointStatus,
    FamilyStatus,
    PageFilter,
    PortStatus,
    RepairRecord,
    SyncRecord,
    Unwatched,
)
from pykubeproxy.rules.drift import TableDrift
from pykubeproxy.services.ports import Frontend, FrontendKind
from pykubeproxy.wording import duration
from tests.fakes.browser import browse, needs_browser
from tests.unit.agent.conftest import Serve

NOW = 1_795_218_836.0


def port(name: str = "web", count: int = 2, policy: str = "Cluster") -> PortStatus:
    endpoints = tuple(
        EndpointStatus(f"10.244.{n // 250}.{n % 250 + 1}", 8080, 1 / count, True, "ready")
        for n in range(count)
    )
    frontends = (
        Frontend(FrontendKind.CLUSTER_IP, "10.96.0.10", 80),
        Frontend(FrontendKind.NODE_PORT, "*", 30080),
    )
    return PortStatus("default", name, "http", "TCP", "IPv4", policy, frontends, endpoints)


def status(**fields: object) -> AgentStatus:
    families = (FamilyStatus("IPv4", overdue=False, last_updated=NOW - 3, services=2, endpoints=9),)
    known: dict[str, object] = {
        "version": "1.2.3",
        "node": "node1",
        "backend": "nft",
        "started": NOW - 93_784,
        "now": NOW,
        "healthy": True,
        "ready": True,
        "alive": True,
        "node_eligible": True,
        "families": families,
    }
    return AgentStatus(**{**known, **fields})  # type: ignore[arg-type]


def full() -> AgentStatus:
    """Return the status of an agent with syncs, services of several kinds, and a failure."""
    syncs = tuple(
        SyncRecord(NOW - 50 + n, "IPv4", n % 20 == 0, 0.9 if n % 20 == 0 else 0.004 + n % 7 / 1000, n)
        for n in range(49)
    )
    failed = SyncRecord(NOW, "IPv6", True, 0.4, failure="iptables-restore rejected line 7")
    services = (port(), port("many", 120), port("gone", 0))
    return status(syncs=(*syncs, failed), services=services, matching=5000, pending_services=1)


def seen(page: str) -> str:
    """Return the text that a browser shows."""
    return " ".join(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL).split())


def test_the_page_shows_a_failing_family() -> None:
    failed = SyncRecord(NOW, "IPv4", True, 0.4, failure="iptables-restore rejected line 7")
    text = seen(status_page(status(syncs=(failed,))))
    assert "Behind: the last IPv4 sync failed; rules stay in place but may miss changes." in text
    assert "IPv4 last sync failed 2 9 0" in text
    assert "up to date" not in text


def test_the_page_shows_the_status() -> None:
    """Health, versions, families, syncs, and the frontends and endpoints of each service port."""
    text = seen(status_page(full()))
    for words in (
        "Healthy: rules are up to date.",
        "Version 1.2.3, iptables backend nft. Up 1 d 2 h, since",
        "1 changed Service waits for the next sync.",
        "IPv4 up to date 2 9 0",
        "Last 50 syncs: median 7 ms, longest 900 ms, 1 failed Ended Family Sync Duration Rules written",
        "IPv6 full, failed 400 ms iptables-restore rejected line 7",
        "Showing 3 of 5000; enter a name to see another one.",
        "default/web:http TCP IPv4 2 of 2 endpoints",
        "cluster IP 10.96.0.10:80, node port 30080 policy Cluster",
        "10.244.0.1:8080 50% ready",
        "0 of 0 endpoints",
        "and 70 more; the JSON form lists all",
    ):
        assert words in text, words


def test_the_page_loads_itself_again_on_demand() -> None:
    """The box keeps its tick."""
    loads = '<meta http-equiv="refresh" content="5">'
    once, again = status_page(full()), status_page(full(), refresh=True)
    assert (loads in once, "checked" in once) == (False, False)
    assert (loads in again, "checked" in again) == (True, True)


def test_values_are_escaped() -> None:
    """Names, reasons and filters are text."""
    evil = '"><script>alert(1)</script>&'
    page = status_page(
        status(
            node=evil,
            version=evil,
            backend=evil,
            unavailable_families={evil: evil},
            filter=PageFilter(evil, evil),
            families=(FamilyStatus(evil, overdue=True),),
            syncs=(SyncRecord(NOW, evil, True, 1.0, failure=evil),),
            services=(
                PortStatus(
                    *(evil,) * 6,
                    (Frontend(FrontendKind.CLUSTER_IP, evil, 1),),
                    (EndpointStatus(evil, 1, 1.0, True, evil),),
                ),
            ),
            matching=1,
        )
    )
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > 15
    assert evil not in page


def test_the_page_has_no_external_resources() -> None:
    """No scripts, and no URLs to load."""
    page = status_page(full())
    assert not re.search(r"<script|src=|href=|url\(|@import|\son\w+=", page)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page


def test_the_largest_page_is_below_2_mb() -> None:
    """200 services with 50 endpoints each."""
    page = status_page(status(services=tuple(port(f"s{n}", 50) for n in range(200)), matching=5000))
    assert len(page) < 2_000_000


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"alive": False, "ready": False, "healthy": False}, "the reconcile loop hangs"),
        ({"ready": False, "healthy": False}, "not in place or not up to date yet"),
        ({"ready": False, "unwatched": (Unwatched("services", NOW - 99, "too large"),)}, "Cut off"),
        (
            {
                "ready": False,
                "healthy": False,
                "families": (FamilyStatus("IPv4", overdue=False, contested=True),),
            },
            "another program keeps undoing the IPv4 rules",
        ),
        (
            {"families": (FamilyStatus("IPv4", overdue=False, contested=True),)},
            "Contested: rules are up to date, but another program keeps undoing the IPv4 rules",
        ),
        ({"healthy": False, "node_eligible": False}, "load balancers should skip it"),
        ({"unwatched": (Unwatched("services", NOW - 99, "refused"),)}, "do not follow changes"),
        (
            {"healthy": False, "ready": False, "waits_for": "process 7 (x)"},
            "process 7 (x), manages the rules",
        ),
    ],
)
def test_each_kind_of_failure_has_a_sentence(fields: dict[str, object], words: str) -> None:
    """In the first line of the status."""
    assert words in health(status(**fields))


def test_failing_watches_are_shown() -> None:
    """Objects, duration and the escaped reason."""
    away = (Unwatched("services", NOW - 99, "<refused>"), Unwatched("nodes", NOW - 5, "reset"))
    page = status_page(status(unwatched=away))
    words = "Watching services, nodes has failed for 1 min 39 s: <refused>."
    assert words in html.unescape(seen(page))
    assert "<refused>" not in page


def test_agents_that_wait_are_shown() -> None:
    """Escaped, because their command lines are foreign text."""
    page = status_page(status(waiting=("process 7 (<run>)", "in another container")))
    words = "Waiting to take over when this agent ends: process 7 (<run>); in another container."
    assert words in html.unescape(seen(page))
    assert "<run>" not in page


def test_drift_repairs_are_shown() -> None:
    """Time, drift, duration and writers; process names are escaped."""
    repair = RepairRecord(
        NOW - 3, "IPv4", 0.123, (TableDrift("nat", rules=2, jumps=1),), ('"<nft>" (process 7)',)
    )
    page = status_page(status(repairs=(repair,)))
    assert 'IPv4 in 123 ms nat: 2 rules, 1 jump missing (by "<nft>" (process 7))' in html.unescape(seen(page))
    assert "<nft>" not in page


def test_an_empty_status() -> None:
    """Before the first sync, and while a sync runs."""
    text = seen(status_page(status(families=(FamilyStatus("IPv4", overdue=False),), busy=True)))
    assert "IPv4 not synced yet 0 0 0 never" in text
    assert "No sync yet." in text
    assert "A sync is running; reload the page to see services." in text
    assert "No changes are pending." in text
    waiting = seen(status_page(status(pending_endpoints=3)))
    assert "3 Services with changed endpoints wait for the next sync." in waiting


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.00412, "4.12 ms"),
        (1.254, "1.25 s"),
        (60, "1 min 0 s"),
        (3725, "1 h 2 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    """Suitable units and few digits."""
    assert duration(seconds) == text


@needs_browser
@pytest.mark.parametrize("width", [500, 1000])
def test_in_a_browser(serve: Serve, tmp_path: Path, width: int) -> None:
    """Chromium renders the page; nothing is wider than the window, phone width included."""
    measured = status_page(full()).replace(
        "</body>",
        "<script>document.title = [innerWidth, document.documentElement.scrollWidth].join(' ')</script></body>",
    )
    at = serve(http.router({"/": lambda _: http.Response(measured.encode(), http.HTML)}))
    picture = tmp_path / "page.png"
    url, size = f"http://127.0.0.1:{at}/", f"--window-size={width},1600"
    inner, scrolled = re.findall(r"<title>(\d+) (\d+)</title>", browse(tmp_path, url, size, "--dump-dom"))[0]
    assert int(scrolled) <= int(inner)
    browse(tmp_path, url, size, f"--screenshot={picture}")
    drawn = picture.read_bytes()
    assert struct.unpack(">II", drawn[16:24])[0] == width
    # An empty page makes a picture of a few kilobytes.
    assert len(drawn) > 20_000
