"""The status page: what it says, what it never says, and how it looks in a browser."""

import html
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from pykubeproxy.agent import http
from pykubeproxy.agent.observe.status import (
    EndpointStatus,
    FamilyStatus,
    Filter,
    Frontend,
    PortStatus,
    Repair,
    Status,
    Sync,
    Unwatched,
)
from pykubeproxy.agent.observe.status_page import status_page
from pykubeproxy.agent.observe.status_text import duration, health, pending
from pykubeproxy.rules.damage import Damage
from tests.unit.agent.conftest import Serve

NOW = 1_795_218_836.0


def port(name: str = "web", count: int = 2, policy: str = "Cluster") -> PortStatus:
    endpoints = tuple(
        EndpointStatus(f"10.244.{n // 250}.{n % 250 + 1}", 8080, 1 / count, True, "ready")
        for n in range(count)
    )
    frontends = (Frontend("cluster-ip", "10.96.0.10", 80), Frontend("node-port", "*", 30080))
    return PortStatus("default", name, "http", "TCP", "IPv4", policy, frontends, endpoints)


def status(**fields: object) -> Status:
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
    return Status(**{**known, **fields})  # type: ignore[arg-type]


def full() -> Status:
    """An agent with a history, services of several kinds, and a failure."""
    syncs = tuple(
        Sync(NOW - 50 + n, "IPv4", n % 20 == 0, 0.9 if n % 20 == 0 else 0.004 + n % 7 / 1000, n)
        for n in range(49)
    )
    failed = Sync(NOW, "IPv6", True, 0.4, failure="iptables-restore refused line 7")
    services = (port(), port("many", 120), port("gone", 0))
    return status(syncs=(*syncs, failed), services=services, matching=5000, pending_services=1)


def seen(page: str) -> str:
    """The text that a browser would show."""
    return " ".join(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL).split())


def test_the_page_says_how_it_is() -> None:
    """Health, versions, families, syncs, and for each service port its frontends and endpoints."""
    text = seen(status_page(full()))
    for words in (
        "pykubeproxy on node1 Healthy: rules are up to date.",
        "Version 1.2.3, iptables backend nft. Up 1 d 2 h, since",
        "1 changed Service waits for the next sync.",
        "IPv4 up to date 2 9 0",
        "The last 50: median 7 ms, longest 900 ms.",
        "IPv6 full, failed 400 ms iptables-restore refused line 7",
        "The first 3 of 5000; name one above to see it.",
        "default/web:http TCP IPv4 2 of 2 endpoints",
        "cluster IP 10.96.0.10:80, node port 30080 policy Cluster",
        "10.244.0.1:8080 50% ready",
        "0 of 0 endpoints",
        "and 70 more, which the JSON form has",
    ):
        assert words in text, words


def test_a_bar_for_each_sync() -> None:
    """As high as it took long, the longest one to the top; failed ones apart."""
    page = status_page(full())
    bars = re.findall(r'<rect class="(\w+)" x="(\d+)" y="([\d.]+)" width="8" height="([\d.]+)">', page)
    assert len(bars) == 50
    assert [kind for kind, *_ in bars].count("full") == 3
    assert bars[-1][0] == "failed"
    assert float(bars[0][3]) == 60.0
    assert all(float(y) + float(height) == pytest.approx(60) for _, _, y, height in bars)
    assert len({x for _, x, *_ in bars}) == 50


def test_nothing_gets_out_of_its_place() -> None:
    """Whatever stands in names, reasons and filters is text."""
    evil = '"><script>alert(1)</script>&'
    page = status_page(
        status(
            node=evil,
            version=evil,
            backend=evil,
            lacking={evil: evil},
            filter=Filter(evil, evil),
            families=(FamilyStatus(evil, overdue=True),),
            syncs=(Sync(NOW, evil, True, 1.0, failure=evil),),
            services=(
                PortStatus(
                    *(evil,) * 6, (Frontend(evil, evil, 1),), (EndpointStatus(evil, 1, 1.0, True, evil),)
                ),
            ),
            matching=1,
        )
    )
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > 15
    assert evil not in page


def test_nothing_comes_from_elsewhere() -> None:
    """No script, and no address of anything to load."""
    page = status_page(full())
    assert not re.search(r"<script|src=|href=|url\(|@import|\son\w+=", page)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page


def test_a_page_of_many_services_is_of_a_size_to_load() -> None:
    """The most that it shows: 200 services of 50 endpoints each, within 2 MB."""
    page = status_page(status(services=tuple(port(f"s{n}", 50) for n in range(200)), matching=5000))
    assert len(page) < 2_000_000


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"alive": False, "ready": False, "healthy": False}, "waiting for too long"),
        ({"ready": False, "healthy": False}, "not in place yet"),
        (
            {
                "ready": False,
                "healthy": False,
                "families": (FamilyStatus("IPv4", overdue=False, contested=True),),
            },
            "somebody undoes the IPv4 rules again and again",
        ),
        ({"healthy": False, "node_eligible": False}, "balancers are to pass it by"),
        ({"unwatched": (Unwatched("services", NOW - 99, "refused"),)}, "they follow no changes"),
    ],
)
def test_what_is_wrong(fields: dict[str, object], words: str) -> None:
    """Each way of not being healthy has its sentence."""
    assert words in health(status(**fields))


def test_an_agent_that_is_cut_off_says_so() -> None:
    """Of what nothing is heard, since when, and why; the reason is the server's words."""
    away = (Unwatched("services", NOW - 99, "<refused>"), Unwatched("nodes", NOW - 5, "reset"))
    page = status_page(status(unwatched=away))
    words = "For 1 min 39 s the API server could not be asked about services, nodes: <refused>."
    assert words in html.unescape(seen(page))
    assert "<refused>" not in page


def test_repairs_are_told_of() -> None:
    """When, what, how fast and by whom; names of processes are others' words."""
    repair = Repair(NOW - 3, "IPv4", 0.123, (Damage("nat", rules=2, jumps=1),), ('"<nft>" (process 7)',))
    page = status_page(status(repairs=(repair,)))
    assert 'IPv4 123 ms nat: 2 rules, 1 jump gone "<nft>" (process 7)' in html.unescape(seen(page))
    assert "<nft>" not in page


def test_little_to_tell() -> None:
    """Before anything happened, and while a sync runs, the page says so."""
    text = seen(status_page(status(families=(FamilyStatus("IPv4", overdue=False),), busy=True)))
    assert "IPv4 not written yet 0 0 0 never" in text
    assert "There has been none yet." in text
    assert "A sync is running; ask again for the services." in text
    assert pending(status()) == ""
    assert pending(status(pending_endpoints=3)) == "3 Services with changed endpoints wait for the next sync."


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
def test_times_for_people(seconds: float, text: str) -> None:
    """In units that fit, with no more digits than one reads."""
    assert duration(seconds) == text


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [500, 1000])
def test_in_a_browser(serve: Serve, tmp_path: Path, width: int) -> None:
    """Headless Chromium draws the page, a phone's width included, and nothing of it is wider than the window."""
    measured = status_page(full()).replace(
        "</body>",
        "<script>document.title = [innerWidth, document.documentElement.scrollWidth].join(' ')</script></body>",
    )
    at = serve(http.pages({"/": lambda: http.Answer(measured.encode(), http.HTML)}))
    picture = tmp_path / "page.png"
    flags = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
        *("--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"),
        *(f"--window-size={width},1600", "--hide-scrollbars"),
    )

    def browse(what: str) -> str:
        command = (str(CHROMIUM), *flags, what, f"http://127.0.0.1:{at}/")
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    inner, scrolled = re.findall(r"<title>(\d+) (\d+)</title>", browse("--dump-dom"))[0]
    assert int(scrolled) <= int(inner)
    browse(f"--screenshot={picture}")
    drawn = picture.read_bytes()
    assert struct.unpack(">II", drawn[16:24])[0] == width
    # An empty page makes a picture of a few kilobytes.
    assert len(drawn) > 20_000
