"""The pages of the metrics address."""

import tracemalloc
from ipaddress import ip_address

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

import pykubeproxy
from pykubeproxy import http
from pykubeproxy.agent.observe.handlers import is_local, metrics_pages, statusz
from pykubeproxy.agent.observe.metrics import Metrics
from pykubeproxy.config import load
from pykubeproxy.objects import Node
from pykubeproxy.pages import servicez
from pykubeproxy.pages.servicez import NodeObjects
from tests.fakes.http_client import TRANSPORT, fetch, recorded_response
from tests.objects import endpoint, service, slice_of
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


def metric_families(port: int) -> list[Metric]:
    """Return the metrics of /metrics/slis."""
    return list(text_string_to_metric_families(fetch(port, "/metrics/slis").body))


@pytest.mark.parametrize(
    "path",
    [
        "/healthz",
        "/healthz?verbose",
        "/healthz?verbose=1&exclude=ping",
        "/healthz?exclude=foo&verbose&exclude=bar",
        "/healthz?exclude=foo",
        "/healthz/",
        "/proxyMode",
        "/configz",
    ],
)
def test_responses_equal_kube_proxys(port: int, path: str) -> None:
    """Status, headers and body, to the byte."""
    expected, got = recorded_response(f"GET :10249{path}"), fetch(port, path)
    assert (got.status, got.body) == (expected.status, expected.body)
    assert {k: v for k, v in got.headers.items() if k not in TRANSPORT} == expected.headers


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_all_methods_get_the_same_page(port: int, method: str) -> None:
    """Only DELETE of /metrics/slis differs."""
    for path in ("/healthz", "/healthz/ping", "/proxyMode", "/configz", "/flagz", "/statusz", "/none"):
        expected, got = fetch(port, path), fetch(port, path, method)
        assert (got.status, got.headers["Content-Type"]) == (
            expected.status,
            expected.headers["Content-Type"],
        )
        assert got.body == expected.body
    assert fetch(port, "/metrics", method).status == 200


def test_ping_is_answered(port: int) -> None:
    """Like kube-proxy's, and as a browser must not guess the type."""
    expected, got = recorded_response("GET :10249/healthz/ping"), fetch(port, "/healthz/ping?verbose")
    assert (got.status, got.body) == (expected.status, expected.body)
    assert got.headers["Content-Type"] == expected.headers["Content-Type"]


def test_slis_count_health_checks(port: int) -> None:
    """Names, types, stability and values are kube-proxy's; DELETE resets the counts; an excluded check does not count."""
    assert [it.name for it in metric_families(port)] == ["process_start_time_seconds"]
    for path in ("/healthz", "/healthz?verbose", "/healthz?exclude=ping", *["/healthz?exclude=foo"] * 3):
        fetch(port, path)
    title = "GET :10249/metrics/slis (after five of /healthz)"
    expected, got = recorded_response(title), fetch(port, "/metrics/slis")
    assert got.headers.keys() - TRANSPORT - {"X-Content-Type-Options"} == expected.headers.keys()
    assert got.headers["Content-Type"] == expected.headers["Content-Type"]
    ours, theirs = (list(text_string_to_metric_families(it.body)) for it in (got, expected))
    assert [(it.name, it.type) for it in ours] == [(it.name, it.type) for it in theirs]
    assert [it.samples for it in ours[:2]] == [it.samples for it in theirs[:2]]
    assert [it.documentation.split()[0] for it in ours] == [it.documentation.split()[0] for it in theirs]
    assert fetch(port, "/metrics/slis", "DELETE").body == recorded_response("DELETE :10249/metrics/slis").body
    assert "kubernetes" not in fetch(port, "/metrics/slis").body
    fetch(port, "/healthz")
    assert metric_families(port)[1].samples[0].value == 1


@pytest.mark.parametrize("path", ["/metrics", "/metrics/slis"])
def test_metrics_are_compressed_on_demand(port: int, path: str) -> None:
    """With gzip only; OpenMetrics and protobuf are not served."""
    plain = fetch(port, path, accept="application/openmetrics-text;version=1.0.0;q=0.9,*/*;q=0.1")
    packed = fetch(port, path, headers={"Accept-Encoding": "gzip"})
    assert "Content-Encoding" not in plain.headers
    assert packed.headers["Content-Encoding"] == "gzip"
    assert "# TYPE process_start_time_seconds gauge\n" in packed.body
    for answer in (plain, packed):
        assert (
            answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8; escaping=underscores"
        )
        assert int(answer.headers["Process-Start-Time-Unix"]) > 1_700_000_000
    assert "Content-Encoding" not in fetch(port, "/configz", headers={"Accept-Encoding": "gzip"}).headers


def test_statusz_as_json_is_refused_to_other_hosts(port: int) -> None:
    """As kube-proxy does: `status` then says where to ask. Browsers get the text."""
    assert fetch(port, "/statusz", accept="application/json").status == 406
    assert fetch(port, "/statusz", accept="text/html").body.startswith("\nkube-proxy statusz\n")


def test_flagz_has_kube_proxys_flags_and_ours(port: int) -> None:
    """Each recorded line is there; other lines have flags that kube-proxy does not have."""
    expected, got = recorded_response("GET :10249/flagz"), fetch(port, "/flagz")
    assert got.headers["Content-Type"] == expected.headers["Content-Type"]
    lines = got.body.splitlines()
    assert [it for it in lines if it in expected.body.splitlines()] == expected.body.splitlines()
    assert set(lines) - set(expected.body.splitlines()) == {
        "dispatch: auto",
        "iptables-backend: auto",
        "max-affinity-lists: 500",
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

    expected, ours = (
        recorded_response("GET :10249/statusz").body,
        statusz(STARTED, STARTED + 11, PATHS),
    )
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
    for path in ("/debug/pprof/", "/"):
        answer = fetch(port, path)
        assert (answer.status, answer.body) == (404, "404 page not found\n")


@pytest.mark.parametrize(
    ("gates", "flagz", "statusz"),
    [
        ("ComponentFlagz=false", 404, 200),
        ("ComponentStatusz=false", 200, 404),
        ("ComponentFlagz=false,ComponentStatusz=false", 404, 404),
        ("AllBeta=false", 404, 404),
        ("AllBeta=false,ComponentFlagz=true", 200, 404),
        ("AllAlpha=false", 200, 200),
    ],
)
def test_feature_gates_turn_pages_off(serve: Serve, gates: str, flagz: int, statusz: int) -> None:
    """As tried with a kube-proxy; /statusz lists /flagz only if it is served."""
    flags = {**FLAGS, "feature-gates": gates}
    port = serve(metrics_pages(Metrics().page, load(None, flags).config, flags))
    assert [fetch(port, path).status for path in ("/flagz", "/statusz")] == [flagz, statusz]
    assert statusz == 404 or ("/flagz" in fetch(port, "/statusz").body) == (flagz == 200)


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


def test_all_objects_are_sent_in_pieces() -> None:
    """Clients that read slowly take little memory, however many objects there are."""
    endpoints = [endpoint(f"10.42.{n}.{m}", pod="x" * 200) for n in range(10) for m in range(1, 101)]
    slices = tuple(slice_of(*endpoints, name=f"web-{n}") for n in range(50))
    found = NodeObjects(
        Node("node1"), (service(), service("api")), slices, api_servers=frozenset({("10.9.9.9", 6443)})
    )
    page = metrics_pages(Metrics(lambda _: None).page, load(None, {}).config, {}, None, lambda *_: found)
    request = http.Request(
        "/servicez", "slices=all", headers={"host": "localhost"}, peer=ip_address("127.0.0.1")
    )
    received: list[int] = []
    tracemalloc.start()
    response = page(request)
    assert response.stream
    response.stream(lambda piece: received.append(len(piece)), 0)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(received) > 10_000_000
    assert most < 2_000_000
    whole: list[bytes] = []
    response.stream(whole.append, 0)
    assert servicez.decode(b"".join(whole)).objects == found
