"""What the loop tells, seen from outside: on the health and metrics addresses and on Services' health check ports."""

import socket
import time
from collections.abc import Callable, Iterator

import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent.observe import observers
from pykubeproxy.agent.observe.observers import BindFailed, Observers
from pykubeproxy.config import load
from pykubeproxy.objects import Deleted, Family, Key, Kind, Listed, Node, Updated
from tests.fakes.asking import ask, free_port
from tests.fakes.follower import eventually
from tests.fakes.notes import Notes
from tests.objects import endpoint, service, slice_of
from tests.reports import HERE, report

NODE = Node(HERE, ("192.168.99.10",))
WEB = Key("ns", "web")


class Agent:
    """Observers on free ports, told things as the loop tells them."""

    def __init__(self, **flags: object) -> None:
        self.health_port, self.metrics_port = free_port(), free_port()
        self.flags: dict[str, object] = {
            "healthz-bind-address": f"127.0.0.1:{self.health_port}",
            "metrics-bind-address": f"127.0.0.1:{self.metrics_port}",
            **{name.replace("_", "-"): value for name, value in flags.items()},
        }
        self.notes = Notes()
        self.seen = Observers(load(None, self.flags).config, HERE, Family, self.notes)

    def sync(self, *objects: object, family: Family = Family.IPV4, settle: bool = True) -> None:
        self.seen.synced(report(*objects, family=family, full=True), {"nat": 5}, ("127.0.0.2",))  # type: ignore[arg-type]
        if settle:
            self.seen.settled(True, NODE)

    def health(self, page: str = "healthz") -> int:
        return ask(self.health_port, f"/{page}").status

    def metric(self, name: str, **labels: str) -> float | None:
        return self.seen.metrics.registry.get_sample_value(f"kubeproxy_{name}", labels)


@pytest.fixture
def make() -> Iterator[Callable[..., Agent]]:
    agents: list[Agent] = []

    def start(**flags: object) -> Agent:
        agents.append(Agent(**flags))
        return agents[-1]

    yield start
    for agent in agents:
        agent.seen.close()


def test_an_agent_is_healthy_once_all_is_in_place(make: Callable[..., Agent]) -> None:
    """Node known, both families synced: then and not before balancers may send clients."""
    agent = make()
    agent.seen.serve(agent.flags)
    agent.seen.queued()
    agent.seen.node(NODE)
    agent.sync()
    assert (agent.health(), agent.health("livez"), agent.health("readyz")) == (503, 200, 503)
    agent.sync(family=Family.IPV6)
    assert (agent.health(), agent.health("livez"), agent.health("readyz")) == (200, 200, 200)
    agent.seen.node(None)
    assert (agent.health(), agent.health("livez")) == (503, 200)
    metrics = ask(agent.metrics_port, "/metrics").body
    for line in (
        'kubeproxy_proxy_healthz_total{code="503"} 2.0',
        'kubeproxy_proxy_healthz_total{code="200"} 1.0',
        'kubeproxy_proxy_livez_total{code="200"} 3.0',
        'kubeproxy_sync_proxy_rules_iptables_total{ip_family="IPv6",table="nat"} 5.0',
    ):
        assert f"\n{line}\n" in metrics
    assert agent.notes.reasons == ["Starting"]


def test_a_sync_that_keeps_failing_is_ill_health(make: Callable[..., Agent]) -> None:
    """Also one that no change has asked for: the first, or one that repairs."""
    agent = make(iptables_sync_period="50ms", iptables_min_sync_period="0s")
    agent.seen.serve(agent.flags)
    agent.seen.node(NODE)
    for family in Family:
        agent.sync(family=family)
    assert agent.health() == 200
    agent.seen.failed(Family.IPV6, full=True, seconds=0.5, writing=True)
    agent.seen.settled(False, NODE)
    eventually(lambda: agent.health() == 503)
    assert agent.health("livez") == 503
    agent.sync(family=Family.IPV6)
    assert agent.health() == 200
    assert agent.metric("sync_proxy_rules_iptables_restore_failures_total", ip_family="IPv6") == 1


def test_changes_are_pending_until_all_families_have_them(make: Callable[..., Agent]) -> None:
    """A failed sync leaves them pending; an event that concerned nobody is no change."""
    agent = make()
    agent.seen.applied(Listed(Kind.SERVICE, (service(),)), {WEB, Key("ns", "b")})
    agent.seen.applied(Updated(slice_of("10.1.0.1")), {WEB})
    agent.seen.applied(Deleted(Kind.ENDPOINT_SLICE, WEB), {WEB})
    agent.seen.applied(Updated(service()), set())
    agent.seen.applied(Updated(NODE), set())

    def pending() -> tuple[float | None, float | None]:
        return (
            agent.metric("sync_proxy_rules_service_changes_pending"),
            agent.metric("sync_proxy_rules_endpoint_changes_pending"),
        )

    assert pending() == (2, 1)
    agent.seen.settled(False, NODE)
    assert pending() == (2, 1)
    agent.seen.settled(True, NODE)
    assert pending() == (0, 0)
    assert agent.metric("sync_proxy_rules_service_changes_total") == 2
    assert agent.metric("sync_proxy_rules_endpoint_changes_total") == 2


def test_latency_is_measured_from_the_trigger_to_the_sync(make: Callable[..., Agent]) -> None:
    """A slice of this moment counts when its family is synced, one of last year never."""
    agent = make()
    agent.seen.applied(Updated(slice_of("10.1.0.1", trigger_time=time.time() + 0.001)), {WEB})
    agent.seen.applied(Updated(slice_of("10.1.0.2", name="old", trigger_time=1.0)), {WEB})
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
def test_health_check_ports_follow_the_services(
    make: Callable[..., Agent], addresses: str, open_at: tuple[str, ...], closed_at: tuple[str, ...]
) -> None:
    """A Service's port opens with the sync that serves it, where nodePortAddresses say, and closes with it."""
    agent = make(**{"nodeport-addresses": addresses} if addresses else {})
    agent.seen.serve(agent.flags)
    port = free_port()
    web = service(type="LoadBalancer", external_local=True, health_check_node_port=port)
    agent.sync(web, slice_of(endpoint("10.1.0.1", node_name=HERE)), settle=False)
    agent.sync(family=Family.IPV6)
    for host in open_at:
        answer = ask(port, host=host)
        assert (answer.status, answer.headers["X-Load-Balancing-Endpoint-Weight"]) == (200, "1")
    for host in closed_at:
        with pytest.raises(ConnectionRefusedError):
            ask(port, host=host)
    agent.sync(service())
    with pytest.raises(ConnectionRefusedError):
        ask(port, host=open_at[0])


def test_a_taken_health_check_port_is_tried_again(make: Callable[..., Agent]) -> None:
    """Even if nothing changes any more."""
    agent = make()
    agent.seen.serve(agent.flags)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        agent.sync(service(type="LoadBalancer", external_local=True, health_check_node_port=port))
        agent.seen.checked()
    assert agent.notes.reasons == ["Starting", "FailedToStartServiceHealthcheck"]
    agent.seen.checked()
    assert ask(port).status == 503


@pytest.mark.parametrize("which", ["healthz", "metrics"])
def test_a_taken_address_is_tried_again(
    make: Callable[..., Agent], which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything else goes on, a line in the log says why, and the address is listened on once it is free."""
    monkeypatch.setattr(observers, "_RETRY_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as other, capture_logs() as logged:
        port: int = other.getsockname()[1]
        agent = make(**{f"{which}-bind-address": f"127.0.0.1:{port}"})
        agent.seen.serve(agent.flags)
        free = agent.metrics_port if which == "healthz" else agent.health_port
        assert ask(free, "/livez" if which == "metrics" else "/healthz").status == 200
    (line,) = (it for it in logged if it["log_level"] == "error")
    assert line["event"].endswith(f"cannot listen on 127.0.0.1:{port}: Address already in use")

    def served() -> bool:
        try:
            return ask(port, "/livez" if which == "healthz" else "/healthz").status == 200
        except ConnectionRefusedError:
            return False

    eventually(served)
    assert agent.notes.reasons == ["Starting"]


@pytest.mark.parametrize(
    ("which", "reason"),
    [("healthz", "FailedToStartProxierHealthcheck"), ("metrics", "FailedToStartMetricServer")],
)
def test_a_taken_address_is_the_end_if_that_is_wanted(
    make: Callable[..., Agent], which: str, reason: str
) -> None:
    """With bindAddressHardFail an event on the Node says why, nothing stays open, and the caller is to exit."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        agent = Agent(**{f"{which}-bind-address": f"127.0.0.1:{port}"}, bind_address_hard_fail=True)
        with pytest.raises(BindFailed, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use$"):
            agent.seen.serve(agent.flags)
    assert (agent.notes.reasons, agent.notes.closed) == ([reason], True)
    for free in (agent.health_port, agent.metrics_port):
        with pytest.raises(ConnectionRefusedError):
            ask(free)


def test_an_unspecified_address_is_every_address(make: Callable[..., Agent]) -> None:
    """0.0.0.0 stands for both families, as in Go; a specific address for itself."""
    port = free_port()
    agent = make(**{"healthz-bind-address": f"0.0.0.0:{port}"})
    agent.seen.serve(agent.flags)
    assert ask(port, "/livez", host="127.0.0.1").status == ask(port, "/livez", host="::1").status == 200
    with pytest.raises(ConnectionRefusedError):
        ask(agent.metrics_port, "/healthz", host="127.0.0.2")


def test_servers_that_are_turned_off_are_not_there(make: Callable[..., Agent]) -> None:
    """Empty addresses mean no server, and no complaint."""
    agent = make(**{"healthz-bind-address": "", "metrics-bind-address": ""})
    agent.seen.serve(agent.flags)
    for port in (agent.health_port, agent.metrics_port):
        with pytest.raises(ConnectionRefusedError):
            ask(port)
    assert agent.notes.reasons == ["Starting"]


def test_a_configuration_taken_up_live_is_shown(make: Callable[..., Agent]) -> None:
    """/configz tells what is in force now."""
    agent = make()
    agent.seen.serve(agent.flags)
    agent.seen.reconfigured(load(None, agent.flags | {"masquerade-all": True}).config)
    assert '"masqueradeAll":true' in ask(agent.metrics_port, "/configz").body


def test_nothing_listens_unless_asked_to(make: Callable[..., Agent]) -> None:
    """An agent that syncs once tells the same and serves nobody."""
    agent = make()
    agent.sync(service(type="LoadBalancer", external_local=True, health_check_node_port=free_port()))
    agent.seen.checked()
    with pytest.raises(ConnectionRefusedError):
        agent.health()
    assert agent.notes.reasons == []
