"""The metrics address of an agent on node1 with two Services, one of them quarantined."""

from types import SimpleNamespace
from typing import cast

from pykubeproxy.agent.observe.metrics import Metrics
from pykubeproxy.agent.observe.object_documents import Objects
from pykubeproxy.agent.observe.pages import metrics_pages
from pykubeproxy.agent.observe.query import list_objects
from pykubeproxy.agent.observe.status import Filter
from pykubeproxy.agent.quarantine.quarantined import Quarantined
from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.config import load
from pykubeproxy.objects import Family, Kind, Listed, Node
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName
from tests.objects import endpoint, service, slice_of
from tests.unit.agent.conftest import Serve

REFUSED = PortName("ns", "api", "http", "TCP")
REFUSING = cast(
    "FamilyTables",
    SimpleNamespace(quarantined=lambda: (Quarantined.from_port(Family.IPV4, REFUSED, "No such file", 1.0),)),
)
API_SERVERS = frozenset({("203.0.113.7", 80)})


def cluster() -> Cluster:
    made = Cluster()
    made.apply(
        Listed(
            Kind.SERVICE,
            (service("web", external_ips=("203.0.113.7",)), service("api", cluster_ip="10.96.0.9")),
        )
    )
    endpoints = (
        endpoint("10.42.1.1", node_name="node1", zone="a", zone_hints=("a",), pod="web-1"),
        endpoint("10.42.2.2", node_name="node2", zone="b", zone_hints=("b",)),
    )
    made.apply(Listed(Kind.ENDPOINT_SLICE, (slice_of(*endpoints, service="web"),)))
    made.apply(Listed(Kind.NODE, (Node("node1", ("192.168.99.10",), zone="a"),)))
    return made


def agent(serve: Serve, busy: int = 0, **flags: str) -> str:
    """Serve the pages of an agent that does not answer the first `busy` times; return its address."""
    settings = {"cluster-cidr": "10.42.0.0/16", **{name.replace("_", "-"): it for name, it in flags.items()}}
    syncs = [None] * busy

    def objects(wanted: Filter, all_slices: bool) -> Objects | None:
        if syncs:
            return syncs.pop()
        return list_objects(cluster(), [REFUSING], "node1", wanted, API_SERVERS, all_slices)

    page = metrics_pages(Metrics(lambda _: None).page, load(None, settings).config, {}, None, objects)
    return f"http://127.0.0.1:{serve(page)}"
