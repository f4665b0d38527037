"""The pages of the metrics address."""

from ipaddress import ip_address

import pytest

import pykubeproxy
from pykubeproxy import http
from pykubeproxy.agent.observe.metrics import Metrics
from pykubeproxy.agent.observe.pages import is_local, metrics_pages, statusz
from pykubeproxy.config import load
from tests.fakes.http_client import TRANSPORT, Response, fetch, recorded_response
from tests.unit.agent.conftest import Serve

# The flags of the kube-proxy that was recorded.
FLAGS: dict[str, object] = {
    "kubeconfig": "kc.yaml",
    "hostname-override": "node1",
    "cluster-cidr": "10.244.0.0/16",
    "proxy-mode": "iptables",
    "conntrack-max-per-core": "0",
    "conntrack-tcp-timeout-established": "0",
    "conntrack-tcp-timeout-close-wait": "0s",
    "v": "2",
}
PATHS = ["/configz", "/flagz", "/healthz", "/metrics", "/proxyMode"]
STARTED = 1_795_218_836.5


@pytest.fixture
def port(serve: Serve) -> int:
    """The port of a server with the pages of an agent with these flags."""
    config = load(None, FLAGS).config
    return serve(metrics_pages(Metrics(lambda _: None).page, config, FLAGS))


@pytest.mark.parametrize("path", ["/healthz", "/proxyMode", "/configz"])
def test_responses_equal_kube_proxys(port: int, path: str) -> None:
    """Status, headers and body, to the byte."""
    expected, got = recorded_response(f"GET :10249{path}"), fetch(port, path)
    assert (got.status, got.body) == (expected.status, expected.body)
    assert {k: v for k, v in got.headers.items() if k not in TRANSPORT} == expected.headers


def test_flagz_has_kube_proxys_flags_and_ours(port: int) -> None:
    """Each recorded line is there; other lines have flags that kube-proxy does not have."""
    expected, got = recorded_response("GET :10249/flagz"), fetch(port, "/flagz")
    assert got.headers["Content-Type"] == expected.headers["Content-Type"]
    lines = got.body.splitlines()
    assert [it for it in lines if it in expected.body.splitlines()] == expected.body.splitlines()
    assert set(lines) - set(expected.body.splitlines()) == {
        "dispatch: auto",
        "iptables-backend: auto",
        "max-service-pairs: 50000",
    }


def test_statusz_equals_kube_proxys_except_versions() -> None:
    """It has Python's version instead of Go's."""

    def sorts(body: str) -> list[str]:
        lines = [
            line if line.startswith(("Started", "Up", "Paths", "Emulation")) else line.split("  ")[0]
            for line in body.splitlines()
        ]
        return [line.replace("Go version", "Python version") for line in lines]

    expected, ours = recorded_response("GET :10249/statusz").body, statusz(STARTED, STARTED + 11.9, PATHS)
    assert sorts(ours) == sorts(expected)
    assert f"\nBinary version  {pykubeproxy.__version__}\n" in ours
    assert ours.endswith("\n")


def test_statusz_formats_times() -> None:
    """More than a day of uptime; a day of the month with one digit."""
    text = statusz(1_780_300_800, 1_780_300_800 + 93_784, PATHS)
    assert "\nStarted  Mon Jun  1 08:00:00 UTC 2026\nUp  26 hr 03 min 04 sec\n" in text


def test_statusz_lists_all_pages(port: int) -> None:
    """Every listed page is served, and no other."""
    (line,) = (it for it in fetch(port, "/statusz").body.splitlines() if it.startswith("Paths"))
    for path in line.split()[1:]:
        assert fetch(port, path).status == 200
    assert fetch(port, "/debug/pprof/") == Response(404, fetch(port, "/").headers, "404 page not found\n")


def test_configz_is_the_configuration_in_force(serve: Serve) -> None:
    """Flags change what it shows."""
    config = load(None, FLAGS | {"oom-score-adj": "7"}).config
    port = serve(metrics_pages(Metrics().page, config, FLAGS))
    assert '"oomScoreAdj":7' in fetch(port, "/configz").body


@pytest.mark.parametrize(
    ("peer", "host", "local"),
    [
        ("127.0.0.1", "127.0.0.1:10249", True),
        ("127.0.0.7", "localhost:8080", True),
        ("::1", "[::1]:10249", True),
        ("127.0.0.1", "evil.example", False),
        ("127.0.0.1", "192.168.99.10:10249", False),
        ("127.0.0.1", "", False),
        ("127.0.0.1", "[127.0.0.1", False),
        ("192.168.99.10", "127.0.0.1:10249", False),
        ("fe80::1%eth0", "[::1]:10249", False),
        (None, "127.0.0.1:10249", False),
    ],
)
def test_only_loopback_is_local(peer: str | None, host: str, local: bool) -> None:
    """Both the client's address and the name that it uses for the server."""
    headers = {"host": host, "x-forwarded-for": "127.0.0.1"}
    assert is_local(http.Request("/", headers=headers, peer=ip_address(peer) if peer else None)) is local


def test_an_ipv4_client_of_a_dual_stack_socket_has_an_ipv4_address(serve: Serve) -> None:
    port = serve(lambda request: http.text(f"{request.peer} {is_local(request)}"), host="")
    assert fetch(port, host="127.0.0.1").body == "127.0.0.1 True"
    assert fetch(port, host="::1").body == "::1 True"


def test_passwords_are_not_shown(serve: Serve) -> None:
    """The secrets of a URL are removed; the kubeconfig is named, not read."""
    flags = FLAGS | {"master": "https://admin:hunter2@10.0.0.1:6443"}
    config = load(None, flags).config
    port = serve(metrics_pages(Metrics().page, config, flags))
    shown = "".join(fetch(port, path).body for path in [*PATHS, "/statusz"])
    assert "\nmaster: https://10.0.0.1:6443\n" in shown
    assert "hunter2" not in shown
