"""Loop events, and their effects on health, metrics, health check ports and listeners."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from pykubeproxy import http
from pykubeproxy.agent import BindFailed
from pykubeproxy.agent.notices import (
    DriftCalm,
    DriftRepaired,
    EventApplied,
    RulesMissing,
    SyncFailure,
    SyncQueued,
    SyncsEnded,
)
from pykubeproxy.agent.observe import listeners
from pykubeproxy.agent.observe.events import as_object
from pykubeproxy.agent.observe.listeners import Listeners
from pykubeproxy.config import ListenAddress, load
from pykubeproxy.objects import Deleted, Family, Key, Kind, Listed, Node, Updated
from pykubeproxy.rules.drift import TableDrift
from pykubeproxy.services.cluster import Cluster
from tests.fakes.http_client import fetch, free_port
from tests.fakes.recorder import FakeRecorder, observers
from tests.fakes.waiting import eventually
from tests.objects import endpoint, service, slice_of
from tests.reports import HERE, report

NODE = Node(HERE, ("192.168.99.10",))


class Agent:
    """Observers on free ports, called as the loop calls them."""

    def __init__(self, **flags: object) -> None:
        self.health_port, self.metrics_port = free_port(), free_port()
        self.flags: dict[str, object] = {
            "healthz-bind-address": f"127.0.0.1:{self.health_port}",
            "metrics-bind-address": f"127.0.0.1:{self.metrics_port}",
            **{name.replace("_", "-"): value for name, value in flags.items()},
        }
        self.notes = FakeRecorder()
        self.observers = observers(load(None, self.flags).config, self.notes)
        self.notice = self.observers.notice

    def sync(self, *objects: object, family: Family = Family.IPV4, settle: bool = True) -> None:
        done = report(*objects, family=family, full=True, rules={"nat": 5})  # type: ignore[arg-type]
        self.notice(msgspec.structs.replace(done, local_addresses=("127.0.0.2",)))
        if settle:
            self.notice(SyncsEnded(True, NODE))

    def health(self, page: str = "healthz") -> int:
        return fetch(self.health_port, f"/{page}").status

    def metric(self, name: str, **labels: str) -> float | None:
        return self.observers.metrics.registry.get_sample_value(f"kubeproxy_{name}", labels)


@pytest.fixture
def make() -> Iterator[Callable[..., Agent]]:
    agents: list[Agent] = []

    def start(**flags: object) -> Agent:
        agents.append(Agent(**flags))
        return agents[-1]

    yield start
    for agent in agents:
        agent.observers.close()


def test_an_agent_is_healthy_after_all_families_are_synced(make: Callable[..., Agent]) -> None:
    """It also needs to know its node."""
    agent = make()
    agent.observers.serve(agent.flags)
    for family in Family:
        agent.notice(SyncQueued(family, time.monotonic()))
    agent.notice(EventApplied(Updated(NODE), {}, NODE))
    agent.sync()
    assert (agent.health(), agent.health("livez"), agent.health("readyz")) == (503, 200, 503)
    agent.sync(family=Family.IPV6)
    assert (agent.health(), agent.health("livez"), agent.health("readyz")) == (200, 200, 200)
    agent.notice(EventApplied(Updated(NODE), {}, None))
    assert (agent.health(), agent.health("livez")) == (503, 200)
    metrics = fetch(agent.metrics_port, "/metrics").body
    for line in (
        'kubeproxy_proxy_healthz_total{code="503"} 2.0',
        'kubeproxy_proxy_healthz_total{code="200"} 1.0',
        'kubeproxy_proxy_livez_total{code="200"} 3.0',
        'kubeproxy_sync_proxy_rules_iptables_total{ip_family="IPv6",table="nat"} 5.0',
    ):
        assert f"\n{line}\n" in metrics
    assert agent.notes.reasons == ["Starting"]


def test_an_agent_is_ready_once_it_serves_more_services_than_are_suspect(make: Callable[..., Agent]) -> None:
    agent = make()
    agent.observers.serve(agent.flags)
    agent.notice(EventApplied(Updated(NODE), {}, NODE))
    done = {family: report(service(), service("b"), family=family) for family in Family}
    answers = []
    for held in (3, 2, 3):
        for family in Family:
            agent.notice(msgspec.structs.replace(done[family], services=2, held=held))
        answers.append(agent.health("readyz"))
    assert answers == [503, 200, 200]


def test_a_deleted_node_is_logged(make: Callable[..., Agent]) -> None:
    """The agent keeps serving, so nothing else shows it."""
    agent = make()
    with capture_logs() as lines:
        for name in ("elsewhere", NODE.name):
            agent.notice(EventApplied(Deleted(Kind.NODE, Key("", name)), {}))
    assert [(line["event"], line["node"]) for line in lines] == [
        ("node deleted, serving with its last state", NODE.name)
    ]


def test_repeated_sync_failures_are_unhealthy(make: Callable[..., Agent]) -> None:
    """Also without a change: the first sync, or a repair."""
    agent = make(iptables_sync_period="50ms", iptables_min_sync_period="0s")
    agent.observers.serve(agent.flags)
    agent.notice(EventApplied(Updated(NODE), {}, NODE))
    for family in Family:
        agent.sync(family=family)
    assert agent.health() == 200
    agent.notice(SyncFailure(Family.IPV6, True, 0.5, True, "refused"))
    agent.notice(SyncsEnded(False, NODE))
    eventually(lambda: agent.health() == 503)
    assert agent.health("livez") == 200
    agent.sync(family=Family.IPV6)
    assert agent.health() == 200
    assert agent.metric("sync_proxy_rules_iptables_restore_failures_total", ip_family="IPv6") == 1


def test_changes_are_pending_until_all_families_are_synced(make: Callable[..., Agent]) -> None:
    """A failed sync leaves them pending."""
    agent, cluster = make(), Cluster()
    for event in (
        Listed(Kind.SERVICE, (service(), service("b"))),
        Updated(slice_of("10.1.0.1")),
        Deleted(Kind.ENDPOINT_SLICE, slice_of("10.1.0.1").key),
        Updated(NODE),
    ):
        agent.notice(EventApplied(event, cluster.apply(event)))

    def pending() -> tuple[float | None, float | None]:
        return (
            agent.metric("sync_proxy_rules_service_changes_pending"),
            agent.metric("sync_proxy_rules_endpoint_changes_pending"),
        )

    assert pending() == (2, 2)
    agent.notice(SyncsEnded(False, NODE))
    assert pending() == (2, 2)
    agent.notice(SyncsEnded(True, NODE))
    assert pending() == (0, 0)
    assert agent.metric("sync_proxy_rules_service_changes_total") == 4
    assert agent.metric("sync_proxy_rules_endpoint_changes_total") == 2


def test_latency_is_measured_from_trigger_to_sync(make: Callable[..., Agent]) -> None:
    """A slice counts when its family is synced, one from before the start never."""
    agent = make()
    agent.notice(EventApplied(Updated(slice_of("10.1.0.1", trigger_time=time.time() + 0.001)), {}))
    agent.notice(EventApplied(Updated(slice_of("10.1.0.2", name="old", trigger_time=1.0)), {}))
    agent.sync(family=Family.IPV6)
    assert agent.metric("network_programming_duration_seconds_count", ip_family="IPv6") is None
    agent.sync()
    assert agent.metric("network_programming_duration_seconds_count", ip_family="IPv4") == 1


@pytest.mark.parametrize(
    ("addresses", "open_at", "closed_at"),
    [
        ("", ("127.0.0.1", "127.0.0.2", "::1"), ()),
        ("127.0.0.0/8,fd00::/64", ("127.0.0.2",), ("127.0.0.1", "::1")),
    ],
)
def test_health_check_ports_follow_services(
    make: Callable[..., Agent], addresses: str, open_at: tuple[str, ...], closed_at: tuple[str, ...]
) -> None:
    """They open where nodePortAddresses allow, also at IPv6 addresses for an IPv4 Service, and close with the Service."""
    agent = make(**{"nodeport-addresses": addresses} if addresses else {})
    agent.observers.serve(agent.flags)
    port = free_port()
    web = service(type="LoadBalancer", external_local=True, health_check_node_port=port)
    agent.sync(web, slice_of(endpoint("10.1.0.1", node_name=HERE)), settle=False)
    agent.sync(family=Family.IPV6)
    for host in open_at:
        answer = fetch(port, host=host)
        assert (answer.status, answer.headers["X-Load-Balancing-Endpoint-Weight"]) == (200, "1")
    for host in closed_at:
        with pytest.raises(ConnectionRefusedError):
            fetch(port, host=host)
    agent.sync(service())
    with pytest.raises(ConnectionRefusedError):
        fetch(port, host=open_at[0])


def test_contention_keeps_health_check_ports_open(make: Callable[..., Agent]) -> None:
    """One event tells of its begin and one of its end; only missing rules close the ports."""
    agent = make()
    agent.observers.serve(agent.flags)
    port = free_port()
    web = service(type="LoadBalancer", external_local=True, health_check_node_port=port)
    agent.sync(web, slice_of(endpoint("10.1.0.1", node_name=HERE)), settle=False)
    agent.sync(family=Family.IPV6)
    for contested in (False, True, True):
        drift = (TableDrift("nat", rules=1),)
        agent.notice(DriftRepaired(Family.IPV4, drift, ("nft (process 7)",), 0.1, contested))
    assert fetch(port).status == 200
    assert agent.observers.metrics.registry.get_sample_value(
        "pykubeproxy_drift_contested", {"ip_family": "IPv4"}
    )
    agent.notice(RulesMissing(Family.IPV4, time.monotonic() - 6))
    assert fetch(port).status == 503
    agent.notice(RulesMissing(Family.IPV4, None))
    assert fetch(port).status == 200
    for _ in range(2):
        agent.notice(DriftCalm(Family.IPV4))
    repaired = ["DriftRepaired"] * 3
    assert sorted(agent.notes.reasons) == ["DriftCalm", "DriftContested", *repaired, "Starting"]
    about = {it.reason: (it.type, it.note) for it in agent.notes.events}
    rules = "IPv4 rules of node node1"
    assert about["DriftCalm"] == ("Normal", f"no other program undoes {rules} any more")
    assert about["DriftContested"] == (
        "Warning",
        f"another program keeps undoing {rules}; pykubeproxy waits longer before each repair",
    )
    assert about["DriftRepaired"] == (
        "Warning",
        f"nft (process 7) changed {rules}; pykubeproxy repaired them: nat: 1 rule missing",
    )


def test_a_health_check_port_in_use_is_retried(make: Callable[..., Agent]) -> None:
    """Also without further changes. The events say the same as those recorded from a kube-proxy; ours have UIDs too."""
    agent = make()
    agent.observers.serve(agent.flags)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        web = service(type="LoadBalancer", external_local=True, health_check_node_port=port)
        agent.sync(msgspec.structs.replace(web, namespace="default"))
        agent.observers.retry_listeners()
    theirs = json.loads((Path(__file__).parents[2] / "data" / "events.json").read_text())
    for made, recorded in zip(agent.notes.events, theirs, strict=True):
        ours: dict[str, Any] = as_object(made, 1, "kube-proxy-vm", uid="0c5d")
        del ours["eventTime"], ours["metadata"], ours["regarding"]["uid"]
        note, _, reason = recorded.pop("note", "").partition("32000: ")
        assert reason == "" or ours["note"] == f"{note}{port}: Address already in use"
        expected = {field: it for field, it in recorded.items() if field in ours}
        assert ours | {"note": ""} == expected | {"note": ""}
        assert recorded.keys() - ours.keys() == {"eventTime", "metadata", "deprecatedSource"}
    agent.observers.retry_listeners()
    assert fetch(port).status == 503


@pytest.mark.parametrize("which", ["healthz", "metrics"])
def test_an_address_in_use_is_retried(
    make: Callable[..., Agent], which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One log line has the reason; the other server works meanwhile."""
    monkeypatch.setattr(listeners, "_RETRY_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as other, capture_logs() as logged:
        port: int = other.getsockname()[1]
        agent = make(**{f"{which}-bind-address": f"127.0.0.1:{port}"})
        agent.observers.serve(agent.flags)
        free = agent.metrics_port if which == "healthz" else agent.health_port
        assert fetch(free, "/livez" if which == "metrics" else "/healthz").status == 200
    (line,) = (it for it in logged if it["log_level"] == "error")
    assert (line["address"], line["reason"]) == (f"127.0.0.1:{port}", "Address already in use")

    def served() -> bool:
        try:
            return fetch(port, "/livez" if which == "healthz" else "/healthz").status == 200
        except ConnectionRefusedError:
            return False

    eventually(served)
    assert agent.notes.reasons == ["Starting"]


@pytest.mark.parametrize(
    ("which", "reason"),
    [("healthz", "FailedToStartProxierHealthcheck"), ("metrics", "FailedToStartMetricServer")],
)
def test_an_address_in_use_fails_the_start_with_hard_fail(
    make: Callable[..., Agent], which: str, reason: str
) -> None:
    """With bindAddressHardFail, an event on the Node has the reason, and all ports are closed."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        agent = Agent(**{f"{which}-bind-address": f"127.0.0.1:{port}"}, bind_address_hard_fail=True)
        with pytest.raises(BindFailed, match=rf"cannot bind 127.0.0.1:{port}: Address already in use;"):
            agent.observers.serve(agent.flags)
    assert (agent.notes.reasons, agent.notes.closed) == ([reason], True)
    for free in (agent.health_port, agent.metrics_port):
        with pytest.raises(ConnectionRefusedError):
            fetch(free)


def test_an_unspecified_address_means_both_families(make: Callable[..., Agent]) -> None:
    """0.0.0.0 means both families, as in Go."""
    port = free_port()
    agent = make(**{"healthz-bind-address": f"0.0.0.0:{port}"})
    agent.observers.serve(agent.flags)
    assert fetch(port, "/livez", host="127.0.0.1").status == fetch(port, "/livez", host="::1").status == 200
    with pytest.raises(ConnectionRefusedError):
        fetch(agent.metrics_port, "/healthz", host="127.0.0.2")


def test_port_0_disables_the_server(make: Callable[..., Agent]) -> None:
    """No error is reported."""
    agent = make(**{"healthz-port": "0", "metrics-port": "0"})
    agent.observers.serve(agent.flags)
    for port in (agent.health_port, agent.metrics_port):
        with pytest.raises(ConnectionRefusedError):
            fetch(port)
    assert agent.notes.reasons == ["Starting"]


def test_nothing_listens_before_serve(make: Callable[..., Agent]) -> None:
    """`run --once` opens no port."""
    agent = make()
    agent.sync(service(type="LoadBalancer", external_local=True, health_check_node_port=free_port()))
    agent.observers.retry_listeners()
    with pytest.raises(ConnectionRefusedError):
        agent.health()
    assert agent.notes.reasons == []


def test_an_object_that_is_too_large_is_an_event(make: Callable[..., Agent]) -> None:
    """In the namespace of the object; one that is deleted causes none."""
    agent, key = make(), Key("ns", "web-abc")
    agent.notice(EventApplied(Deleted(Kind.ENDPOINT_SLICE, key), {}))
    agent.notice(EventApplied(Deleted(Kind.ENDPOINT_SLICE, key, "it has more than 16 MiB"), {}))
    (event,) = agent.notes.events
    assert (event.kind, event.regarding, event.reason) == ("EndpointSlice", key, "ObjectSkipped")
    assert event.note == f"node {HERE} skips EndpointSlice ns/web-abc: it has more than 16 MiB"


CONFIG = load(None, {}).config


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("0.0.0.0", [""]),
        ("::", [""]),
        ("192.0.2.1", ["192.0.2.1", "127.0.0.1"]),
        ("fd00::1", ["fd00::1", "127.0.0.1"]),
        ("::1", ["::1", "127.0.0.1"]),
        ("127.0.0.1", ["127.0.0.1"]),
        ("127.0.0.2", ["127.0.0.2", "127.0.0.1"]),
    ],
)
@pytest.mark.parametrize("name", ["health", "metrics"])
def test_each_page_is_served_on_127_0_0_1_too(
    name: str, host: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet's probes go there, on IPv6-only nodes too; an empty host means all addresses of both families."""
    opened: list[tuple[str, int, bytes]] = []

    class Server:
        def __init__(self, name: str) -> None:
            pass

        def listen(self, host: str, port: int, page: http.Handler) -> None:
            opened.append((host, port, page(http.Request("/")).body))

    monkeypatch.setattr(listeners, "Server", Server)
    addresses = {
        "health_address": None,
        "metrics_address": None,
        f"{name}_address": ListenAddress(host, 10000),
    }
    config = msgspec.structs.replace(CONFIG, **addresses)
    pages = {it: lambda _, it=it: http.Response(it.encode()) for it in ("health", "metrics")}
    Listeners(hard_fail=True).open(config, pages["health"], pages["metrics"])
    assert opened == [(it, 10000, name.encode()) for it in expected]
