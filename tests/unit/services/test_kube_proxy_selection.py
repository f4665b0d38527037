"""Endpoint selection exactly as in kube-proxy."""

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
from pykubeproxy.services.selection import NodeTopology, ResolvedPort, Selection, resolve_ports
from tests.objects import endpoint, service, slice_of

HERE = NodeTopology("node1", "zone-a")
HTTP = Port("http", Protocol.TCP, 80)


def resolved(
    *slices: EndpointSlice, of: Service | None = None, node: NodeTopology = HERE
) -> tuple[ResolvedPort, ...]:
    cluster = Cluster()
    it = of or service()
    cluster.apply(Listed(Kind.SERVICE, (it,)))
    cluster.apply(Listed(Kind.ENDPOINT_SLICE, slices))
    return resolve_ports(cluster, it.key, Family.IPV4, node)


def targets(*slices: EndpointSlice, of: Service | None = None, node: NodeTopology = HERE) -> list[str]:
    """Return the endpoints in use under policy Cluster."""
    ((it),) = resolved(*slices, of=of, node=node)
    return [it.target for it in it.selection.cluster]


def selection(*slices: EndpointSlice, of: Service) -> Selection:
    ((it),) = resolved(*slices, of=of)
    return it.selection


def test_endpoints_are_sorted_as_text() -> None:
    """ "10" sorts before "9": the order decides on probabilities."""
    assert targets(slice_of("10.0.0.9", "10.0.0.10", "10.0.0.1")) == [
        "10.0.0.10:8080",
        "10.0.0.1:8080",
        "10.0.0.9:8080",
    ]


def test_running_pod_wins_over_terminating_pod_with_same_address() -> None:
    """In any order, in one slice or two."""
    ends, runs = endpoint("10.0.0.1", terminating=True, serving=False), endpoint("10.0.0.1")
    for first, second in ((ends, runs), (runs, ends)):
        assert targets(slice_of(first, second)) == ["10.0.0.1:8080"]
        assert targets(slice_of(first, name="s1"), slice_of(second, name="s2")) == ["10.0.0.1:8080"]


def test_later_duplicate_wins() -> None:
    """Even if the earlier one is ready."""
    ready, unready = endpoint("10.0.0.1"), endpoint("10.0.0.1", ready=False)
    assert targets(slice_of(ready, unready)) == []
    assert targets(slice_of(unready, ready)) == ["10.0.0.1:8080"]


def test_earlier_of_two_terminating_duplicates_wins() -> None:
    """Even if only one of them serves."""
    serves, stopped = (
        endpoint("10.0.0.1", terminating=True),
        endpoint("10.0.0.1", terminating=True, serving=False),
    )
    assert targets(slice_of(serves, stopped)) == ["10.0.0.1:8080"]
    assert targets(slice_of(stopped, serves)) == []


def test_slices_may_differ_in_their_ports() -> None:
    """A named target port may differ between pods."""
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
def test_unusable_slice_ports(port: EndpointPort) -> None:
    """Ports without name or number, and of another protocol or name, are skipped."""
    assert targets(slice_of("10.0.0.1", ports=(port,))) == []


def test_empty_port_name() -> None:
    """An empty name matches an empty name."""
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
    """Zone hints are followed if all ready endpoints have one and one is for this zone."""
    made = (endpoint(f"10.0.0.{n}", zone_hints=zones) for n, zones in enumerate(hints, 1))
    assert targets(slice_of(*made)) == expected


def test_node_without_zone_ignores_zone_hints() -> None:
    """An unknown zone matches no hint."""
    hinted = slice_of(
        endpoint("10.0.0.1", zone_hints=("zone-a",)), endpoint("10.0.0.2", zone_hints=("zone-b",))
    )
    assert len(targets(hinted, node=NodeTopology("node1", ""))) == 2


def test_node_hints_come_first() -> None:
    """Without a node hint for this node, zone hints are followed."""
    here = endpoint("10.0.0.1", node_hints=("node1",), zone_hints=("zone-b",))
    there = endpoint("10.0.0.2", node_hints=("node2",), zone_hints=("zone-a",))
    assert targets(slice_of(here, there)) == ["10.0.0.1:8080"]
    assert targets(slice_of(here, there), node=NodeTopology("node3", "zone-a")) == ["10.0.0.2:8080"]


def test_hints_of_unready_endpoints_do_not_matter() -> None:
    """Neither missing hints of unready endpoints nor their hints for this zone count."""
    hinted = endpoint("10.0.0.1", zone_hints=("zone-a",)), endpoint("10.0.0.2", zone_hints=("zone-b",))
    assert targets(slice_of(*hinted, endpoint("10.0.0.3", ready=False))) == ["10.0.0.1:8080"]
    only = endpoint("10.0.0.3", ready=False, zone_hints=("zone-a",))
    assert targets(slice_of(hinted[1], only)) == ["10.0.0.2:8080"]


def test_hints_do_not_matter_for_the_last_resort() -> None:
    """Without ready endpoints, all serving terminating endpoints are used."""
    ends = (
        endpoint(f"10.0.0.{n}", terminating=True, zone_hints=(zone,))
        for n, zone in ((1, "zone-a"), (2, "zone-b"))
    )
    assert targets(slice_of(*ends)) == ["10.0.0.1:8080", "10.0.0.2:8080"]


def test_ready_and_terminating_is_ready() -> None:
    """With publishNotReadyAddresses, such an endpoint is used like any other."""
    both = endpoint("10.0.0.1", ready=True, terminating=True)
    assert targets(slice_of(both, "10.0.0.2")) == ["10.0.0.1:8080", "10.0.0.2:8080"]


def test_serving_but_not_ready_is_used_only_while_terminating() -> None:
    """Serving alone is not enough."""
    assert targets(slice_of(endpoint("10.0.0.1", ready=False, serving=True))) == []


def test_policy_local_decides_last_resort_by_local_endpoints() -> None:
    """Under policy Local a terminating local endpoint is used even if another node has a ready one."""
    ends = endpoint("10.0.0.1", terminating=True, node_name="node1")
    chosen = selection(
        slice_of(ends, "10.0.0.2"),
        of=service(type="NodePort", external_local=True, ports=(Port("http", Protocol.TCP, 80, 30080),)),
    )
    assert [it.target for it in chosen.cluster] == ["10.0.0.2:8080"]
    assert [it.target for it in chosen.local] == ["10.0.0.1:8080"]
    assert [it.target for it in chosen.reachable] == ["10.0.0.1:8080", "10.0.0.2:8080"]


def test_no_endpoint_is_local_without_a_node_name() -> None:
    """An empty nodeName does not match an empty node name."""
    ((it),) = resolved(slice_of("10.0.0.1"), of=service(internal_local=True), node=NodeTopology(""))
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
def test_skipped_slices(slice_: EndpointSlice) -> None:
    """Headless, without Service, of the other family, FQDN, or without an address."""
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
def test_skipped_services(
    fields: dict[str, object], labels: dict[str, str], reason: ServiceSkipReason
) -> None:
    """The reason does not depend on other fields."""
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
def test_external_policy_depends_on_service_type(
    kind: str, external_ips: tuple[str, ...], local: bool, health_check: int
) -> None:
    """The policy is ignored if left over from another type."""
    it = service(type=kind, external_ips=external_ips, external_local=True, health_check_node_port=32000)
    ((port),) = service_ports(it, Family.IPV4)  # type: ignore[misc]
    assert (port.external_local, port.health_check_node_port) == (local, health_check)


@pytest.mark.parametrize(
    ("ranges", "four", "six"),
    [
        (("10.0.0.0/8", "fd00::/8"), ("10.0.0.0/8",), ("fd00::/8",)),
        (("10.0.0.0/8", "0.0.0.0/0", "fd00::/8"), None, ("fd00::/8",)),
        (("::/0",), None, None),
        (("fd00::/8",), None, ("fd00::/8",)),
    ],
)
def test_source_ranges(
    ranges: tuple[str, ...], four: tuple[str, ...] | None, six: tuple[str, ...] | None
) -> None:
    """Each family uses its own ranges; a range of all addresses disables the filter."""
    it = service(cluster_ips=("10.96.0.10", "fd00:96::10"), source_ranges=ranges)
    for family, expected in ((Family.IPV4, four), (Family.IPV6, six)):
        ((port),) = service_ports(it, family)  # type: ignore[misc]
        assert port.source_ranges == expected


@pytest.mark.parametrize(
    ("ranges", "four", "six"),
    [
        (("10.0.0.0/33",), (), ()),
        (("10.0.0.0/33", "10.1.0.0/16"), ("10.1.0.0/16",), ()),
        (("", "fd00::/8"), (), ("fd00::/8",)),
        (("example.com", "0.0.0.0/0"), None, ()),
    ],
)
def test_an_invalid_source_range_admits_nobody(
    ranges: tuple[str, ...], four: tuple[str, ...] | None, six: tuple[str, ...] | None
) -> None:
    """A family without a valid range is closed: the invalid one may have been meant for it."""
    spec = {"clusterIP": "10.96.0.10", "clusterIPs": ["10.96.0.10", "fd00:96::10"], "ports": [{"port": 80}]}
    spec["loadBalancerSourceRanges"] = list(ranges)
    it = decode(Kind.SERVICE, json.dumps({"metadata": {"name": "a"}, "spec": spec}).encode())
    assert isinstance(it, Service)
    for family, expected in ((Family.IPV4, four), (Family.IPV6, six)):
        ((port),) = service_ports(it, family)  # type: ignore[misc]
        assert port.source_ranges == expected


def test_an_invalid_cluster_ip_costs_one_family() -> None:
    """The other family is served."""
    spec = {"clusterIP": "10.96.0.256", "clusterIPs": ["10.96.0.256", "fd00:96::10"], "ports": [{"port": 80}]}
    it = decode(Kind.SERVICE, json.dumps({"metadata": {"name": "a"}, "spec": spec}).encode())
    assert isinstance(it, Service)
    assert service_ports(it, Family.IPV4) is ServiceSkipReason.REJECTED_CLUSTER_IP
    ((port),) = service_ports(it, Family.IPV6)  # type: ignore[misc]
    assert port.cluster_ip == "fd00:96::10"


def test_external_ips_can_be_disabled() -> None:
    """With AllowServiceExternalIPs=false the Service has no external frontends."""
    it = service(external_ips=("192.0.2.1",))
    ((port),) = service_ports(it, Family.IPV4, allow_external_ips=False)  # type: ignore[misc]
    assert port.external_ips == ()
    assert not port.externally_accessible


@pytest.mark.parametrize(("mode", "included"), [(None, True), ("VIP", True), ("Proxy", False), ("", False)])
def test_ip_mode_proxy_is_excluded(mode: str | None, included: bool) -> None:
    """Ingress addresses with ipMode Proxy are left out."""
    spec = {"type": "LoadBalancer", "clusterIP": "10.0.0.1", "ports": [{"port": 80}]}
    ingress = [{"ip": "198.51.100.1", "ipMode": mode}, {"hostname": "lb.example"}]
    status = {"loadBalancer": {"ingress": ingress}}
    raw = json.dumps({"metadata": {"name": "a", "namespace": "b"}, "spec": spec, "status": status}).encode()
    it = decode(Kind.SERVICE, raw)
    assert isinstance(it, Service)
    assert it.load_balancer_ips == (("198.51.100.1",) if included else ())
