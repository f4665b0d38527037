"""The status of an agent: who tells it, in which form, and that nobody has to wait for it."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import pytest

from pykubeproxy.agent.observe.metrics import Metrics
from pykubeproxy.agent.observe.observers import Observers
from pykubeproxy.agent.observe.pages import metrics_pages, preferred, read_filter
from pykubeproxy.agent.observe.query import Query, see
from pykubeproxy.agent.observe.status import Filter, Status, decode, encode
from pykubeproxy.agent.observe.status_service import StatusService
from pykubeproxy.agent.startup import Families
from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.config import load
from pykubeproxy.kernel import Backend
from pykubeproxy.objects import Endpoint, Family, Kind, Listed, Port, Protocol, Updated
from pykubeproxy.rules.context import KernelFacts, terms
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.sources import ManifestWatch, Trouble
from tests.fakes.asking import ask
from tests.fakes.iptables import FakeIptables
from tests.fakes.notes import Notes
from tests.objects import endpoint, service, slice_of
from tests.unit.agent.conftest import Serve

CONFIG = load(None, {}).config


class Proxy:
    """Tables of one family over a cluster, and all that tells of them."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        self.tables = FamilyTables(FakeIptables(Backend.LEGACY), None)
        self.observers = Observers(CONFIG, "node1", [Family.IPV4], Notes(), needs_node=False)
        self.answers = True

    def sync(self, *objects: object) -> None:
        touched = set()
        for object_ in objects:
            touched |= self.cluster.apply(Updated(object_))  # type: ignore[arg-type]
        on = terms(CONFIG, "node1", None, KernelFacts(nfacct=False), Family.IPV4)
        self.observers.synced(self.tables.sync(self.cluster, touched, on), {}, ())

    def put(self, enquiry: Query) -> None:
        if self.answers:
            enquiry.meet(self.cluster, [self.tables])

    def status(self, wanted: Filter | None = None) -> Status:
        families = Families(Backend.LEGACY, (), {Family.IPV6: "no NAT"})
        return StatusService("node1", families, self.observers, self.put).status(wanted or Filter())


@pytest.fixture
def proxy() -> Proxy:
    return Proxy()


def named(status: Status) -> list[str]:
    return [port.title for port in status.services]


def test_before_the_first_sync(proxy: Proxy) -> None:
    """There is an answer, and it says that nothing is in place."""
    status = proxy.status()
    assert (status.ready, status.services, status.syncs) == (False, (), ())
    assert status.families[0].last_updated is None
    assert status.lacking == {"IPv6": "no NAT"}


def test_shares_and_states(proxy: Proxy) -> None:
    """Each endpoint stands under each policy with its share and the reason for it, the frontends with theirs."""
    web = service(
        type="LoadBalancer",
        external_local=True,
        load_balancer_ips=("203.0.113.7",),
        ports=(Port("http", Protocol.TCP, 80, 30080),),
    )
    proxy.sync(
        web,
        slice_of(
            endpoint("10.244.1.1", node_name="node1"),
            endpoint("10.244.2.2"),
            endpoint("10.244.3.3", ready=False),
        ),
    )
    cluster, local = proxy.status().services
    assert (cluster.policy, [it.kind for it in cluster.frontends]) == ("Cluster", ["cluster-ip"])
    assert [(it.address, it.share, it.state) for it in cluster.endpoints] == [
        ("10.244.1.1", 0.5, "ready"),
        ("10.244.2.2", 0.5, "ready"),
        ("10.244.3.3", 0.0, "not ready"),
    ]
    assert [(it.kind, it.address, it.port) for it in local.frontends] == [
        ("load-balancer-ip", "203.0.113.7", 80),
        ("node-port", "*", 30080),
    ]
    assert [(it.share, it.used) for it in local.endpoints] == [(1.0, True), (0.0, False), (0.0, False)]


def test_what_is_asked_for(proxy: Proxy) -> None:
    """By namespace, by name, and never more than the limit; how many there are is told all the same."""
    names = [f"s{n}" for n in range(5)]
    proxy.sync(*(service(name, cluster_ip=f"10.96.0.{n + 1}") for n, name in enumerate(names)))
    assert named(proxy.status(Filter(limit=2))) == ["ns/s0:http", "ns/s1:http"]
    assert proxy.status(Filter(limit=2)).matching == 5
    assert named(proxy.status(Filter(service="s3"))) == ["ns/s3:http"]
    assert named(proxy.status(Filter(namespace="other"))) == []
    assert (named(proxy.status(Filter(limit=0))), proxy.status(Filter(limit=0)).matching) == ([], 5)


def test_a_loop_that_is_busy_keeps_nobody_waiting(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be told without it is told; the question it finds later costs it nothing."""
    monkeypatch.setattr("pykubeproxy.agent.observe.status_service._PATIENCE", 0.01)
    proxy.sync(service())
    asked: list[Query] = []
    monkeypatch.setattr(proxy, "put", asked.append)
    status = proxy.status()
    assert status.busy and not status.services
    assert len(status.syncs) == 1 and status.families[0].services == 1
    asked[0].meet(Cluster(), ())
    assert asked[0].answer.cancelled()


def test_the_objects(proxy: Proxy) -> None:
    """By name with their EndpointSlices, without a name all Services; the Node is this one, known or not."""
    proxy.sync(service("web"), service("api", cluster_ip="10.96.0.9"), slice_of("10.244.1.1", service="web"))
    desk = StatusService("node1", Families(Backend.LEGACY, (), {}), proxy.observers, proxy.put)
    found = desk.objects(Filter(service="web"))
    assert found is not None
    assert [it.name for it in found.services] == ["web"]
    assert [it.service for it in found.slices] == ["web"]
    assert found.node.name == "node1"
    everything = desk.objects(Filter())
    assert everything is not None
    assert (len(everything.services), everything.slices) == (2, ())
    proxy.answers = False


def test_what_is_not_watched(proxy: Proxy) -> None:
    """An agent that does not hear the API server is healthy, as its rules are in place, and says that it is cut off."""
    proxy.sync(service("web"))
    away, well = ManifestWatch("-"), ManifestWatch("-")
    away.trouble = Trouble("services", 9.5, "refused")
    desk = StatusService("node1", Families(Backend.LEGACY, (), {}), proxy.observers, proxy.put, (away, well))
    status = desk.status(Filter())
    (unwatched,) = status.unwatched
    assert (unwatched.objects, unwatched.why) == ("services", "refused")
    assert status.now - unwatched.since == pytest.approx(9.5, abs=1)
    assert status.healthy


def test_an_enquiry_never_harms_the_loop(proxy: Proxy) -> None:
    """Whatever goes wrong goes to the one who asks."""
    answer: Future[object] = Future()
    Query(lambda cluster, tables: see(cluster, tables, Filter()), answer).meet(
        proxy.cluster,
        [object()],  # type: ignore[list-item]
    )
    assert isinstance(answer.exception(), AttributeError)


def test_asking_while_the_cluster_changes(proxy: Proxy) -> None:
    """Many threads ask at once; each gets a whole answer."""
    proxy.sync(*(service(f"s{n}", cluster_ip=f"10.96.0.{n + 1}") for n in range(50)))
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(len(proxy.status().services))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [50] * 8


def test_very_many_endpoints_end_the_list(monkeypatch: pytest.MonkeyPatch, proxy: Proxy) -> None:
    """The loop is not kept for long by services with thousands of endpoints."""
    monkeypatch.setattr("pykubeproxy.agent.observe.query._MOST_ENDPOINTS", 30)
    pods = [Endpoint(f"10.244.0.{n}") for n in range(1, 21)]
    services = [service(f"s{n}", cluster_ip=f"10.96.0.{n + 1}") for n in range(5)]
    proxy.sync(*services, *(slice_of(*pods, service=f"s{n}") for n in range(5)))
    seen = see(proxy.cluster, [proxy.tables], Filter())
    assert (seen.matching, len(seen.services)) == (5, 2)


def test_the_last_syncs(proxy: Proxy) -> None:
    """Fifty of them are remembered, with what they wrote and why they failed."""
    proxy.sync(service())
    for number in range(60):
        proxy.observers.failed(Family.IPV4, False, number / 1000, writing=True, why="refused")
    syncs = proxy.status().syncs
    assert len(syncs) == 50
    assert (syncs[-1].seconds, syncs[-1].failure, syncs[-1].full) == (0.059, "refused", False)


def test_what_waits(proxy: Proxy) -> None:
    """Changes that came since the last sync are counted by kind."""
    slices = Listed(Kind.ENDPOINT_SLICE, (slice_of("10.244.1.1"),))
    proxy.observers.applied(slices, proxy.cluster.apply(slices))
    status = proxy.status()
    assert (status.pending_services, status.pending_endpoints) == (0, 1)


def test_the_json_reads_back(proxy: Proxy) -> None:
    """Nothing is lost, names are in camel case, and a later version is refused."""
    proxy.sync(service(), slice_of("10.244.1.1"))
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
        "setAside",
        "contested",
    }
    with pytest.raises(ValueError, match="pykubeproxy/v2"):
        decode(encode(msgspec.structs.replace(proxy.status(), api_version="pykubeproxy/v2")))


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("", "text"),
        ("*/*", "text"),
        ("text/*", "text"),
        ("image/png", "text"),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "html"),
        ("application/json", "json"),
        ("text/html;q=0.4, application/json;q=0.5", "json"),
        ("application/json;q=0, text/html", "html"),
        ("application/json; q=nonsense, text/html;q=0.1", "html"),
    ],
)
def test_the_form_that_is_asked_for(accept: str, wanted: str) -> None:
    """As browsers, curl and programs ask."""
    offered = ("text/plain; charset=utf-8", "text/html; charset=utf-8", "application/json")
    assert wanted in preferred(accept, offered).replace("plain", "text-text")


def test_filters_are_read() -> None:
    """A name may bring its namespace; a number that is none, or too high, is refused."""
    assert read_filter("service=ns%2Fweb&namespace=") == Filter("ns", "web")
    assert read_filter("namespace=ns&service=web&limit=3") == Filter("ns", "web", 3)
    assert read_filter("") == Filter()
    for query in ("limit=-1", "limit=x", "limit=9999999"):
        with pytest.raises(ValueError, match="limit is a number"):
            read_filter(query)


@pytest.fixture
def page(proxy: Proxy, serve: Serve) -> Callable[[str, str], tuple[int, str, str]]:
    port = serve(metrics_pages(Metrics(lambda _: None).page, lambda: CONFIG, {}, proxy.status))

    def get(path: str, accept: str) -> tuple[int, str, str]:
        answer = ask(port, path, accept=accept)
        return answer.status, answer.headers["Content-Type"], answer.body

    return get


def test_the_page_by_its_forms(proxy: Proxy, page: Callable[[str, str], tuple[int, str, str]]) -> None:
    """One address, three forms; and what is asked for wrongly is refused in a line."""
    proxy.sync(service(), slice_of("10.244.1.1"))
    status, kind, body = page("/statusz?service=ns/web", "text/html")
    assert (status, kind) == (200, "text/html; charset=utf-8") and "ns/web:http" in body
    status, kind, body = page("/statusz?limit=0", "application/json")
    assert (status, kind) == (200, "application/json") and decode(body.encode()).matching == 1
    assert page("/statusz", "*/*")[2].startswith("\nkube-proxy statusz\n")
    assert page("/statusz?limit=x", "text/html")[::2] == (
        400,
        "400 bad request: limit is a number up to 1000\n",
    )
