"""Fine points in which kube-proxy decides who serves."""

import json

import pytest

from pykubeproxy.objects import (
    EndpointPort,
    EndpointSlice,
    Family,
    Kind,
    Listed,
    Port,
    Protocol,
    Service,
    decode,
)
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import ServiceSkipReason, service_ports
from pykubeproxy.services.resolve import ResolvedPort, resolve_ports
from pykubeproxy.services.selection import NodeTopology, Selection
from tests.objects import endpoint, service, slice_of

HERE = NodeTopology("node1", "zone-a")
HTTP = Port("http", Protocol.TCP, 80)


def served(
    *slices: EndpointSlice, of: Service | None = None, place: NodeTopology = HERE
) -> tuple[ResolvedPort, ...]:
    cluster = Cluster()
    it = of or service()
    cluster.apply(Listed(Kind.SERVICE, (it,)))
    cluster.apply(Listed(Kind.ENDPOINT_SLICE, slices))
    return resolve_ports(cluster, it.key, Family.IPV4, place)


def targets(*slices: EndpointSlice, of: Service | None = None, place: NodeTopology = HERE) -> list[str]:
    """The endpoints in use under policy Cluster."""
    ((it),) = served(*slices, of=of, place=place)
    return [backend.target for backend in it.selection.cluster]


def selection(*slices: EndpointSlice, of: Service) -> Selection:
    ((it),) = served(*slices, of=of)
    return it.selection


def test_endpoints_are_sorted_as_text() -> None:
    """ "10" comes before "9": the order decides about probabilities, so it is kept to the letter."""
    assert targets(slice_of("10.0.0.9", "10.0.0.10", "10.0.0.1")) == [
        "10.0.0.10:8080",
        "10.0.0.1:8080",
        "10.0.0.9:8080",
    ]


def test_a_running_pod_beats_one_that_ends_at_the_same_address() -> None:
    """In whichever order, in one slice or in two."""
    ends, runs = endpoint("10.0.0.1", terminating=True, serving=False), endpoint("10.0.0.1")
    for first, second in ((ends, runs), (runs, ends)):
        assert targets(slice_of(first, second)) == ["10.0.0.1:8080"]
        assert targets(slice_of(first, name="s1"), slice_of(second, name="s2")) == ["10.0.0.1:8080"]


def test_of_two_that_do_not_end_the_later_counts() -> None:
    """Even if the earlier one was ready."""
    ready, unready = endpoint("10.0.0.1"), endpoint("10.0.0.1", ready=False)
    assert targets(slice_of(ready, unready)) == []
    assert targets(slice_of(unready, ready)) == ["10.0.0.1:8080"]


def test_of_two_that_end_the_earlier_counts() -> None:
    """A later one that no longer serves does not take its place."""
    serves, stopped = (
        endpoint("10.0.0.1", terminating=True),
        endpoint("10.0.0.1", terminating=True, serving=False),
    )
    assert targets(slice_of(serves, stopped)) == ["10.0.0.1:8080"]
    assert targets(slice_of(stopped, serves)) == []


def test_slices_may_differ_in_their_ports() -> None:
    """As with a named target port that differs between pods."""
    other = slice_of("10.0.0.2", name="s2", ports=(EndpointPort("http", Protocol.TCP, 9090),))
    assert targets(slice_of("10.0.0.1", name="s1"), other) == ["10.0.0.1:8080", "10.0.0.2:9090"]


@pytest.mark.parametrize(
    "port",
    [
        EndpointPort(None, Protocol.TCP, 8080),
        EndpointPort("http", Protocol.TCP, None),
        EndpointPort("http", Protocol.UDP, 8080),
        EndpointPort("", Protocol.TCP, 8080),
    ],
)
def test_ports_that_are_none(port: EndpointPort) -> None:
    """Without a name, without a number, of another protocol, of another name."""
    assert targets(slice_of("10.0.0.1", ports=(port,))) == []


def test_a_port_without_a_name() -> None:
    """An empty name is a name."""
    nameless = service(ports=(Port("", Protocol.TCP, 80),))
    slices = slice_of("10.0.0.1", ports=(EndpointPort("", Protocol.TCP, 8080),))
    assert targets(slices, of=nameless) == ["10.0.0.1:8080"]


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        ([("zone-a",), ("zone-b",)], ["10.0.0.1:8080"]),
        ([("zone-a",), ()], ["10.0.0.1:8080", "10.0.0.2:8080"]),
        ([("zone-b",), ("zone-c",)], ["10.0.0.1:8080", "10.0.0.2:8080"]),
        ([("zone-b", "zone-a"), ("zone-a",)], ["10.0.0.1:8080", "10.0.0.2:8080"]),
    ],
)
def test_zone_hints(hints: list[tuple[str, ...]], expected: list[str]) -> None:
    """All ready endpoints need one, and one must be for here; else none counts."""
    made = (endpoint(f"10.0.0.{n}", zone_hints=zones) for n, zones in enumerate(hints, 1))
    assert targets(slice_of(*made)) == expected


def test_a_node_without_a_zone_heeds_no_zone_hints() -> None:
    """Neither does one whose label is empty."""
    hinted = slice_of(
        endpoint("10.0.0.1", zone_hints=("zone-a",)), endpoint("10.0.0.2", zone_hints=("zone-b",))
    )
    assert len(targets(hinted, place=NodeTopology("node1", ""))) == 2


def test_node_hints_come_first() -> None:
    """Where they are of no use, zone hints have their turn."""
    here = endpoint("10.0.0.1", node_hints=("node1",), zone_hints=("zone-b",))
    there = endpoint("10.0.0.2", node_hints=("node2",), zone_hints=("zone-a",))
    assert targets(slice_of(here, there)) == ["10.0.0.1:8080"]
    assert targets(slice_of(here, there), place=NodeTopology("node3", "zone-a")) == ["10.0.0.2:8080"]


def test_hints_of_unready_endpoints_do_not_matter() -> None:
    """Neither that they have none, nor that theirs is the only one for here."""
    hinted = endpoint("10.0.0.1", zone_hints=("zone-a",)), endpoint("10.0.0.2", zone_hints=("zone-b",))
    assert targets(slice_of(*hinted, endpoint("10.0.0.3", ready=False))) == ["10.0.0.1:8080"]
    only = endpoint("10.0.0.3", ready=False, zone_hints=("zone-a",))
    assert targets(slice_of(hinted[1], only)) == ["10.0.0.2:8080"]


def test_hints_do_not_matter_for_the_last_resort() -> None:
    """With none ready, every serving endpoint that ends is used."""
    ends = (
        endpoint(f"10.0.0.{n}", terminating=True, zone_hints=(zone,))
        for n, zone in ((1, "zone-a"), (2, "zone-b"))
    )
    assert targets(slice_of(*ends)) == ["10.0.0.1:8080", "10.0.0.2:8080"]


def test_ready_and_terminating_is_ready() -> None:
    """So publishNotReadyAddresses has it: such an endpoint is used like any other."""
    both = endpoint("10.0.0.1", ready=True, terminating=True)
    assert targets(slice_of(both, "10.0.0.2")) == ["10.0.0.1:8080", "10.0.0.2:8080"]


def test_unready_but_serving_is_not_used_unless_it_ends() -> None:
    """Serving alone says nothing."""
    assert targets(slice_of(endpoint("10.0.0.1", ready=False, serving=True))) == []


def test_the_last_resort_is_decided_apart_for_this_node() -> None:
    """Under policy Local this node's own ending endpoint serves while another node has a ready one."""
    ends = endpoint("10.0.0.1", terminating=True, node_name="node1")
    chosen = selection(
        slice_of(ends, "10.0.0.2"),
        of=service(type="NodePort", external_local=True, ports=(Port("http", Protocol.TCP, 80, 30080),)),
    )
    assert [it.target for it in chosen.cluster] == ["10.0.0.2:8080"]
    assert [it.target for it in chosen.local] == ["10.0.0.1:8080"]
    assert [it.target for it in chosen.reachable] == ["10.0.0.1:8080", "10.0.0.2:8080"]


def test_without_a_node_name_nothing_is_local() -> None:
    """An endpoint without nodeName does not run on a node without a name."""
    ((it),) = served(slice_of("10.0.0.1"), of=service(internal_local=True), place=NodeTopology(""))
    assert it.selection.local == ()
    assert it.selection.any_usable


@pytest.mark.parametrize(
    "slice_",
    [
        slice_of("10.0.0.1", headless=True),
        slice_of("10.0.0.1", service=""),
        slice_of("fd00::1"),
        EndpointSlice("ns", "s", "web", None, (), (EndpointPort("http", Protocol.TCP, 8080),)),
        slice_of(endpoint("")),
    ],
)
def test_slices_that_do_not_count(slice_: EndpointSlice) -> None:
    """Headless, nobody's, of the other family, of names, without an address."""
    assert targets(slice_, slice_of("10.0.0.9", name="counts")) == ["10.0.0.9:8080"]


@pytest.mark.parametrize(
    ("fields", "labels", "reason"),
    [
        ({"clusterIP": ""}, {}, ServiceSkipReason.NO_CLUSTER_IP),
        ({"clusterIP": "None"}, {}, ServiceSkipReason.HEADLESS),
        ({"clusterIP": "None", "clusterIPs": ["None"]}, {}, ServiceSkipReason.HEADLESS),
        ({"clusterIP": "fd00::1"}, {}, ServiceSkipReason.OTHER_FAMILY),
        ({"type": "ExternalName", "clusterIP": "10.0.0.1"}, {}, ServiceSkipReason.EXTERNAL_NAME),
        (
            {"clusterIP": "10.0.0.1"},
            {"service.kubernetes.io/service-proxy-name": ""},
            ServiceSkipReason.OTHER_PROXY,
        ),
        (
            {"clusterIP": "10.0.0.1"},
            {"service.kubernetes.io/service-proxy-name": "kube-proxy"},
            ServiceSkipReason.OTHER_PROXY,
        ),
    ],
)
def test_services_that_are_left_out(
    fields: dict[str, object], labels: dict[str, str], reason: ServiceSkipReason
) -> None:
    """Whatever else they say."""
    spec = {"ports": [{"port": 80}], "externalIPs": ["192.0.2.1"], **fields}
    raw = json.dumps({"metadata": {"name": "a", "namespace": "b", "labels": labels}, "spec": spec}).encode()
    it = decode(Kind.SERVICE, raw)
    assert isinstance(it, Service)
    assert service_ports(it, Family.IPV4) is reason


@pytest.mark.parametrize(
    ("kind", "external_ips", "local", "health_check"),
    [
        ("ClusterIP", (), False, 0),
        ("ClusterIP", ("192.0.2.1",), True, 0),
        ("NodePort", (), True, 0),
        ("LoadBalancer", (), True, 32000),
    ],
)
def test_external_policy_means_something_for_some(
    kind: str, external_ips: tuple[str, ...], local: bool, health_check: int
) -> None:
    """What is left over from another type is not heeded."""
    it = service(type=kind, external_ips=external_ips, external_local=True, health_check_node_port=32000)
    ((port),) = service_ports(it, Family.IPV4)  # type: ignore[misc]
    assert (port.external_local, port.health_check_node_port) == (local, health_check)


@pytest.mark.parametrize(
    ("ranges", "four", "six"),
    [
        (("10.0.0.0/8", "fd00::/8"), ("10.0.0.0/8",), ("fd00::/8",)),
        (("10.0.0.0/8", "0.0.0.0/0", "fd00::/8"), (), ("fd00::/8",)),
        (("::/0",), (), ()),
        (("fd00::/8",), (), ("fd00::/8",)),
    ],
)
def test_source_ranges(ranges: tuple[str, ...], four: tuple[str, ...], six: tuple[str, ...]) -> None:
    """Each family heeds its own; where one range holds everybody, there is nothing to filter."""
    it = service(cluster_ips=("10.96.0.10", "fd00:96::10"), source_ranges=ranges)
    for family, expected in ((Family.IPV4, four), (Family.IPV6, six)):
        ((port),) = service_ports(it, family)  # type: ignore[misc]
        assert port.source_ranges == expected


def test_external_ips_can_be_switched_off() -> None:
    """AllowServiceExternalIPs=false: no rules for them, and the service counts as not reachable from outside."""
    it = service(external_ips=("192.0.2.1",))
    ((port),) = service_ports(it, Family.IPV4, allow_external_ips=False)  # type: ignore[misc]
    assert port.external_ips == ()
    assert not port.externally_accessible


@pytest.mark.parametrize(
    ("mode", "served_here"), [(None, True), ("VIP", True), ("Proxy", False), ("", False)]
)
def test_load_balancers_that_keep_their_packets(mode: str | None, served_here: bool) -> None:
    """With ipMode Proxy there are no rules for an address."""
    spec = {"type": "LoadBalancer", "clusterIP": "10.0.0.1", "ports": [{"port": 80}]}
    ingress = [{"ip": "198.51.100.1", "ipMode": mode}, {"hostname": "lb.example"}]
    status = {"loadBalancer": {"ingress": ingress}}
    raw = json.dumps({"metadata": {"name": "a", "namespace": "b"}, "spec": spec, "status": status}).encode()
    it = decode(Kind.SERVICE, raw)
    assert isinstance(it, Service)
    assert it.load_balancer_ips == (("198.51.100.1",) if served_here else ())
