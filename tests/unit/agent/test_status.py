"""The status of an agent, its forms, and how it is asked of the loop."""

import json
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from pykubeproxy.agent.notices import EventApplied, SyncFailure
from pykubeproxy.agent.observe.handlers import metrics_pages, read_filter
from pykubeproxy.agent.observe.metrics import Metrics
from pykubeproxy.agent.observe.status import LoopQuery, StatusService, list_services
from pykubeproxy.agent.startup import Families
from pykubeproxy.config import load
from pykubeproxy.kernel import Backend
from pykubeproxy.objects import Endpoint, Family, Kind, Listed, Node, Object, Port, Protocol, Updated
from pykubeproxy.pages.statusz import AgentStatus, PageFilter, decode, encode
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.sources import Outage
from pykubeproxy.sources.manifests import ManifestWatch
from tests.fakes.http_client import fetch
from tests.fakes.recorder import FakeRecorder, observers
from tests.fakes.synced import SyncedFamily
from tests.fakes.waiting import PATIENCE
from tests.objects import endpoint, service, slice_of
from tests.unit.agent.conftest import Serve

CONFIG = load(None, {}).config


class Proxy(SyncedFamily):
    """Tables of one family over a cluster, with observers and a status service."""

    def __init__(self) -> None:
        super().__init__()
        self.observers = observers(CONFIG, FakeRecorder(), Family.IPV4, needs_node=False)

    def follow(self, *objects: Object) -> None:
        report = self.sync(*(Updated(it) for it in objects))
        self.observers.notice(report)

    def put(self, query: LoopQuery[Any]) -> None:
        query.answer(self.cluster, [self.tables])

    def service(self, *watches: ManifestWatch) -> StatusService:
        families = Families(Backend.LEGACY, (), {Family.IPV6: "no NAT"})
        return StatusService("node1", families, self.observers, self.put, watches)

    def status(self, expected: PageFilter | None = None) -> AgentStatus:
        return self.service().status(expected or PageFilter())


@pytest.fixture
def proxy() -> Proxy:
    return Proxy()


def named(status: AgentStatus) -> list[str]:
    return [port.title for port in status.services]


def test_before_the_first_sync(proxy: Proxy) -> None:
    """The status says that no rules are in place."""
    status = proxy.status()
    assert (status.ready, status.services, status.syncs) == (False, (), ())
    assert status.families[0].last_updated is None
    assert status.unavailable_families == {"IPv6": "no NAT"}


def test_shares_and_states(proxy: Proxy) -> None:
    """Each endpoint has its share and reason under each policy."""
    web = service(
        type="LoadBalancer",
        external_local=True,
        load_balancer_ips=("203.0.113.7",),
        ports=(Port("http", Protocol.TCP, 80, 30080),),
    )
    proxy.follow(
        web,
        slice_of(
            endpoint("10.244.1.1", node_name="node1"),
            endpoint("10.244.2.2"),
            endpoint("10.244.3.3", ready=False),
        ),
    )
    cluster, local = proxy.status().services
    assert (cluster.policy, [it.kind.value for it in cluster.frontends]) == ("Cluster", ["cluster-ip"])
    assert [(it.address, it.share, it.state) for it in cluster.endpoints] == [
        ("10.244.1.1", 0.5, "ready"),
        ("10.244.2.2", 0.5, "ready"),
        ("10.244.3.3", 0.0, "not ready"),
    ]
    assert [(it.kind.value, it.address, it.port) for it in local.frontends] == [
        ("load-balancer-ip", "203.0.113.7", 80),
        ("node-port", "*", 30080),
    ]
    assert [(it.share, it.used) for it in local.endpoints] == [(1.0, True), (0.0, False), (0.0, False)]


def test_services_are_filtered(proxy: Proxy) -> None:
    """By namespace and name, up to the limit; `matching` counts all."""
    names = [f"s{n}" for n in range(5)]
    proxy.follow(*(service(name, cluster_ip=f"10.96.0.{n + 1}") for n, name in enumerate(names)))
    assert named(proxy.status(PageFilter(limit=2))) == ["ns/s0:http", "ns/s1:http"]
    assert proxy.status(PageFilter(limit=2)).matching == 5
    assert named(proxy.status(PageFilter(service="s3"))) == ["ns/s3:http"]
    assert named(proxy.status(PageFilter(namespace="other"))) == []
    assert (named(proxy.status(PageFilter(limit=0))), proxy.status(PageFilter(limit=0)).matching) == ([], 5)


def test_a_busy_loop_leaves_out_services(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is returned, and the late query is cancelled."""
    monkeypatch.setattr("pykubeproxy.agent.observe.status._TIMEOUT", 0.01)
    proxy.follow(service())
    queries: list[LoopQuery[Any]] = []
    monkeypatch.setattr(proxy, "put", queries.append)
    status = proxy.status()
    assert status.busy and not status.services
    assert len(status.syncs) == 1 and status.families[0].services == 1
    queries[0].answer(Cluster(), ())
    assert queries[0].future.cancelled()


def test_objects(proxy: Proxy) -> None:
    """With EndpointSlices for a named Service; the Node is this one, known or not."""
    proxy.follow(
        service("web"), service("api", cluster_ip="10.96.0.9"), slice_of("10.244.1.1", service="web")
    )
    found = proxy.service().objects(PageFilter(service="web"))
    assert found is not None
    assert [it.name for it in found.services] == ["web"]
    assert [it.service for it in found.slices] == ["web"]
    assert found.node.name == "node1"
    everything = proxy.service().objects(PageFilter())
    assert everything is not None
    assert (len(everything.services), everything.slices) == (2, ())


def test_a_failing_watch_is_reported(proxy: Proxy) -> None:
    """The agent stays healthy: its rules are in place."""
    proxy.follow(service("web"))
    away, well = ManifestWatch("-"), ManifestWatch("-")
    away.outage = Outage("services", 9.5, "refused")
    status = proxy.service(away, well).status(PageFilter())
    (unwatched,) = status.unwatched
    assert (unwatched.objects, unwatched.reason) == ("services", "refused")
    assert status.now - unwatched.since == pytest.approx(9.5, abs=1)
    assert status.started <= unwatched.since
    assert status.healthy


def test_a_failing_query_does_not_harm_the_loop(proxy: Proxy) -> None:
    """The asking thread gets the exception."""
    answer: Future[object] = Future()
    LoopQuery(lambda cluster, tables: list_services(cluster, tables, PageFilter()), answer).answer(
        proxy.cluster,
        [object()],  # type: ignore[list-item]
    )
    assert isinstance(answer.exception(), AttributeError)


def test_many_endpoints_end_the_list(monkeypatch: pytest.MonkeyPatch, proxy: Proxy) -> None:
    """Services with thousands of endpoints do not block the loop."""
    monkeypatch.setattr("pykubeproxy.agent.observe.status._MOST_ENDPOINTS", 30)
    pods = [Endpoint(f"10.244.0.{n}") for n in range(1, 21)]
    services = [service(f"s{n}", cluster_ip=f"10.96.0.{n + 1}") for n in range(5)]
    proxy.follow(*services, *(slice_of(*pods, service=f"s{n}") for n in range(5)))
    listed = list_services(proxy.cluster, [proxy.tables], PageFilter())
    assert (listed.matching, len(listed.ports)) == (5, 2)


def test_the_last_syncs_are_kept(proxy: Proxy) -> None:
    """Fifty of them, with rules written and failures."""
    proxy.follow(service())
    for number in range(60):
        proxy.observers.notice(SyncFailure(Family.IPV4, False, number / 1000, True, "refused"))
    syncs = proxy.status().syncs
    assert len(syncs) == 50
    assert (syncs[-1].seconds, syncs[-1].failure, syncs[-1].full) == (0.059, "refused", False)


def test_pending_changes_are_counted(proxy: Proxy) -> None:
    """By kind of object."""
    slices = Listed(Kind.ENDPOINT_SLICE, (slice_of("10.244.1.1"),))
    proxy.observers.notice(EventApplied(slices, proxy.cluster.apply(slices)))
    status = proxy.status()
    assert (status.pending_services, status.pending_endpoints) == (0, 1)


def test_json_round_trip(proxy: Proxy) -> None:
    """Nothing is lost, keys are in camel case, other versions are rejected."""
    proxy.follow(service(), slice_of("10.244.1.1"))
    text = encode(proxy.status())
    assert encode(decode(text)) == text
    found = json.loads(text)
    assert found["apiVersion"] == "pykubeproxy/v1"
    assert found["families"][0].keys() == {
        "family",
        "overdue",
        "lastUpdated",
        "services",
        "endpoints",
        "rules",
        "quarantined",
        "contested",
        "rejectedTree",
    }
    with pytest.raises(ValueError, match="pykubeproxy/v2"):
        decode(encode(msgspec.structs.replace(proxy.status(), api_version="pykubeproxy/v2")))


def test_filters_are_parsed() -> None:
    """A service may include its namespace; invalid limits are rejected."""
    assert read_filter("service=ns%2Fweb&namespace=") == PageFilter("ns", "web")
    assert read_filter("namespace=ns&service=web&limit=3") == PageFilter("ns", "web", 3)
    assert read_filter("") == PageFilter()
    for query in ("limit=-1", "limit=x", "limit=9999999"):
        with pytest.raises(ValueError, match="limit must be a number"):
            read_filter(query)


@pytest.fixture
def page(proxy: Proxy, serve: Serve) -> Callable[[str, str], tuple[int, str, str]]:
    port = serve(metrics_pages(Metrics(lambda _: None).page, CONFIG, {}, proxy.status))

    def get(path: str, accept: str) -> tuple[int, str, str]:
        answer = fetch(port, path, accept=accept)
        return answer.status, answer.headers["Content-Type"], answer.body

    return get


def test_statusz_as_html_json_and_text(
    proxy: Proxy, page: Callable[[str, str], tuple[int, str, str]]
) -> None:
    """An invalid filter is answered with status 400. Only a browser finds something at /, as kube-proxy has nothing."""
    proxy.follow(service(), slice_of("10.244.1.1"))
    status, kind, body = page("/statusz?service=ns/web", "text/html")
    assert (status, kind) == (200, "text/html; charset=utf-8") and "ns/web:http" in body
    status, kind, body = page("/statusz?limit=0", "application/json")
    assert (status, kind) == (200, "application/json") and decode(body.encode()).matching == 1
    assert page("/statusz", "*/*")[2].startswith("\nkube-proxy statusz\n")
    assert page("/statusz?limit=x", "text/html")[::2] == (
        400,
        "400 bad request: limit must be a number up to 1000\n",
    )
    assert 'http-equiv="refresh"' in page("/statusz?service=&refresh=on", "text/html")[2]
    assert [page("/", accept)[0] for accept in ("text/html", "*/*", "application/json")] == [302, 404, 404]


def test_status_stays_without_the_gate_of_statusz(proxy: Proxy, serve: Serve) -> None:
    """For clients on this node; the gate turns kube-proxy's page off."""
    off = load(None, {"feature-gates": "ComponentStatusz=false"}).config
    port = serve(metrics_pages(Metrics(lambda _: None).page, off, {}, proxy.status))
    accepted = ("application/json", "text/html", "text/plain", "*/*")
    assert [fetch(port, "/statusz", accept=it).status for it in accepted] == [200, 200, 404, 404]


def test_one_query_at_a_time() -> None:
    """Concurrent clients queue; the loop never has more than one query."""
    box: queue.SimpleQueue[LoopQuery[Any]] = queue.SimpleQueue()
    # Queries for objects need neither families nor observers.
    service, everybody = StatusService("n", None, None, box.put), threading.Barrier(9)  # type: ignore[arg-type]

    def ask() -> object:
        everybody.wait()
        return service.objects(PageFilter())

    with ThreadPoolExecutor(8) as clients:
        answers = [clients.submit(ask) for _ in range(8)]
        everybody.wait()
        for _ in answers:
            query = box.get(timeout=PATIENCE)
            assert box.empty()
            query.answer(Cluster(), ())
    assert [it.result().node for it in answers] == [Node("n")] * 8  # type: ignore[attr-defined]
