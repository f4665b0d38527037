"""What the server adds to services: cluster IPs, node ports, families, policies."""

from typing import Any

import pytest

from pykubeproxy.lab.apiserver import SERVICES, ApiError, Store
from tests.unit.lab.apiserver.conftest import Maker

V4, V6 = "10.96.0.0/16", "fd00:10:96::/112"


@pytest.fixture
def store() -> Any:
    return Store((V4, V6))


def spec_of(store: Any, item: Any) -> Any:
    return store.create(item)["spec"]


def test_cluster_ips_differ_and_spare_the_low_end(store: Any, service: Maker) -> None:
    """Dynamic addresses start behind those that people ask for by number."""
    addresses = [spec_of(store, service(f"s{number}"))["clusterIP"] for number in range(3)]
    assert addresses == ["10.96.1.1", "10.96.1.2", "10.96.1.3"]


def test_asked_for_addresses_are_given_once(store: Any, service: Maker) -> None:
    """The second who asks is refused; after a deletion the address is free."""
    assert spec_of(store, service("dns", clusterIP="10.96.0.10"))["clusterIPs"] == ["10.96.0.10"]
    with pytest.raises(ApiError, match="already allocated"):
        store.create(service("other", clusterIP="10.96.0.10"))
    store.delete(SERVICES, "default", "dns")
    store.create(service("other", clusterIP="10.96.0.10"))


def test_a_small_range_is_used_up_and_used_again(service: Maker) -> None:
    """All addresses but the first and last of the range are given out, then none, then those given back."""
    store = Store(("10.96.0.0/29",))
    given = {spec_of(store, service(f"s{number}"))["clusterIP"] for number in range(6)}
    assert given == {f"10.96.0.{number}" for number in range(1, 7)}
    with pytest.raises(ApiError, match="range is full"):
        store.create(service("s6"))
    store.delete(SERVICES, "default", "s3")
    assert spec_of(store, service("s6"))["clusterIP"] in given


@pytest.mark.parametrize(
    ("asked", "families", "policy"),
    [
        ({}, ["IPv4"], "SingleStack"),
        ({"ipFamilies": ["IPv6"]}, ["IPv6"], "SingleStack"),
        ({"clusterIP": "fd00:10:96::9"}, ["IPv6"], "SingleStack"),
        ({"ipFamilyPolicy": "PreferDualStack"}, ["IPv4", "IPv6"], "PreferDualStack"),
        (
            {"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6"]},
            ["IPv6", "IPv4"],
            "RequireDualStack",
        ),
        ({"ipFamilies": ["IPv6", "IPv4"]}, ["IPv6", "IPv4"], "RequireDualStack"),
    ],
)
def test_families(store: Any, service: Maker, asked: Any, families: Any, policy: Any) -> None:
    """One family or two, in the order asked for, with an address of each."""
    spec = spec_of(store, service("web", **asked))
    assert (spec["ipFamilies"], spec["ipFamilyPolicy"]) == (families, policy)
    assert ["IPv6" if ":" in address else "IPv4" for address in spec["clusterIPs"]] == families
    assert spec["clusterIP"] == spec["clusterIPs"][0]


def test_two_families_need_two_ranges(service: Maker) -> None:
    """PreferDualStack makes do with one, RequireDualStack does not."""
    store = Store((V4,))
    assert spec_of(store, service("a", ipFamilyPolicy="PreferDualStack"))["ipFamilies"] == ["IPv4"]
    with pytest.raises(ApiError, match="IPv4 only"):
        store.create(service("b", ipFamilyPolicy="RequireDualStack"))


def test_headless(store: Any, service: Maker) -> None:
    """No address is taken; without a selector it is of both families, as a real server has it."""
    spec = spec_of(store, service("web", clusterIP="None", selector={"app": "web"}))
    assert (spec["clusterIPs"], spec["ipFamilies"]) == (["None"], ["IPv4"])
    assert spec_of(store, service("bare", clusterIP="None"))["ipFamilies"] == ["IPv4", "IPv6"]
    assert spec_of(store, service("next"))["clusterIP"] == "10.96.1.1"


def test_node_ports(store: Any, service: Maker) -> None:
    """Allocated, asked for, shared by two protocols on one port, and never twice."""
    assert spec_of(store, service("a", type="NodePort"))["ports"][0]["nodePort"] == 30086
    ports = [{"name": "d", "port": 53, "protocol": "UDP"}, {"name": "t", "port": 53, "protocol": "TCP"}]
    dns = [port["nodePort"] for port in spec_of(store, service("b", type="NodePort", ports=ports))["ports"]]
    assert dns == [30087, 30087]
    with pytest.raises(ApiError, match="already allocated"):
        store.create(service("c", type="NodePort", ports=[{"port": 1, "nodePort": 30087}]))


def test_load_balancer(store: Any, service: Maker) -> None:
    """Policies, node ports and, with the Local policy, a health check port."""
    spec = spec_of(store, service("a", type="LoadBalancer", externalTrafficPolicy="Local"))
    assert spec["allocateLoadBalancerNodePorts"] is True
    numbers = {spec["ports"][0]["nodePort"], spec["healthCheckNodePort"]}
    assert len(numbers) == 2
    assert all(30000 <= number < 32768 for number in numbers)
    without = spec_of(store, service("b", type="LoadBalancer", allocateLoadBalancerNodePorts=False))
    assert "nodePort" not in without["ports"][0]
    assert without["externalTrafficPolicy"] == "Cluster"


def test_replacing_keeps_what_was_allocated(store: Any, service: Maker) -> None:
    """A manifest applied again, without addresses and ports, keeps them."""
    before = spec_of(store, service("web", type="LoadBalancer", externalTrafficPolicy="Local"))
    manifest = service("web", type="LoadBalancer", externalTrafficPolicy="Local", selector={"app": "web"})
    assert store.replace(manifest)["spec"] == before | {"selector": {"app": "web"}}


def test_cluster_ip_does_not_change(store: Any, service: Maker) -> None:
    """Asking for another one is refused."""
    store.create(service("web"))
    with pytest.raises(ApiError, match="may not change once set"):
        store.merge_patch(SERVICES, "default", "web", {"spec": {"clusterIP": "10.96.0.77"}})


def test_changing_the_type_sheds_what_the_old_one_had(store: Any, service: Maker) -> None:
    """LoadBalancer → NodePort → ClusterIP → ExternalName → ClusterIP; ports and addresses come back to the pool."""
    first = spec_of(store, service("web", type="LoadBalancer", externalTrafficPolicy="Local"))

    def become(**spec: Any) -> Any:
        return store.merge_patch(SERVICES, "default", "web", {"spec": spec})["spec"]

    as_node_port = become(type="NodePort")
    assert not {"healthCheckNodePort", "allocateLoadBalancerNodePorts"} & as_node_port.keys()
    assert as_node_port["ports"] == first["ports"]
    plain = become(type="ClusterIP")
    assert "externalTrafficPolicy" not in plain
    assert "nodePort" not in plain["ports"][0]
    port = first["ports"][0]["nodePort"]
    store.create(service("heir", type="NodePort", ports=[{"port": 80, "nodePort": port}]))
    external = become(type="ExternalName", externalName="example.com")
    assert not {"clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"} & external.keys()
    store.create(service("heir2", clusterIP=first["clusterIP"]))
    assert become(type="ClusterIP", externalName=None)["clusterIP"] not in ("", first["clusterIP"])


def test_affinity(store: Any, service: Maker) -> None:
    """ClientIP lasts three hours unless told otherwise, and goes with the setting."""
    spec = spec_of(store, service("web", sessionAffinity="ClientIP"))
    assert spec["sessionAffinityConfig"] == {"clientIP": {"timeoutSeconds": 10800}}
    after = store.merge_patch(SERVICES, "default", "web", {"spec": {"sessionAffinity": "None"}})["spec"]
    assert "sessionAffinityConfig" not in after
