"""explain names invalid values, and addresses that are not served."""

import json
from collections.abc import Sequence
from typing import Any

import click
import msgspec
import pytest

from pykubeproxy.config import load
from pykubeproxy.inspect.explain.model import explain_nodes
from pykubeproxy.inspect.explain.report import explain_report
from pykubeproxy.inspect.targets import ServiceFilter
from pykubeproxy.objects import Family, Kind, Node, Updated, decode
from pykubeproxy.report.document import document, json_text
from pykubeproxy.report.text import text
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import ApiServers

CONFIG = load(None, {}).config


def explained(
    service: dict[str, object],
    *endpoints: str,
    slice_ports: Sequence[dict[str, object]] = ({"name": "", "port": 8080},),
    api_servers: ApiServers = frozenset(),
) -> tuple[str, dict[str, Any]]:
    """Return text and JSON for a Service default/web with these endpoints."""
    slice_ = {
        "metadata": {"name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [it]} for it in endpoints],
        "ports": slice_ports,
    }
    cluster = Cluster()
    for kind, it in ((Kind.SERVICE, {"metadata": {"name": "web"}, **service}), (Kind.ENDPOINT_SLICE, slice_)):
        cluster.apply(Updated(decode(kind, msgspec.json.encode(it))))
    contexts = {
        family: rule_context(CONFIG, "n", None, KernelFacts(), family, api_servers) for family in Family
    }
    found = explain_nodes(cluster, ServiceFilter(name="web"), [Node("n")], lambda _: contexts)
    report = explain_report(found, [Node("n")])
    (service_,) = json.loads(json_text(document(report)))["services"]
    return " ".join(click.unstyle(text(report.blocks(wide=False))).split()), service_


def test_an_invalid_external_ip_is_named() -> None:
    """With field and reason; the other addresses are served."""
    spec = {"clusterIP": "10.96.0.1", "ports": [{"port": 80}], "externalIPs": ["192.0.2.1", "127.0.0.1"]}
    shown, found = explained({"spec": spec}, "10.244.1.1")
    assert "The field spec.externalIPs[1] is '127.0.0.1', a loopback address: it is skipped." in shown
    assert "External IP 192.0.2.1:80 leads to" in shown
    skipped = {"field": "spec.externalIPs[1]", "value": "127.0.0.1", "message": "a loopback address"}
    assert found["skippedValues"] == [{"port": None, **skipped}]


def test_an_invalid_cluster_ip_means_no_rules() -> None:
    shown, found = explained({"spec": {"clusterIP": "127.0.0.1", "ports": [{"port": 80}]}})
    assert "It has no rules: its cluster IP is not a valid service address." in shown
    assert found["ports"] == []


@pytest.mark.parametrize("address", ["127.0.0.1", "10.244.1", "fd00::1", "junk \x1b[31m"])
def test_an_invalid_endpoint_address_is_skipped(address: str) -> None:
    """The other endpoints get all traffic."""
    spec = {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}
    shown, found = explained({"spec": spec}, address, "10.244.1.1")
    assert "100% 10.244.1.1:8080 ready" in shown
    assert f"{address!r} in slice web-1: its address is malformed, of the other family, loopback," in shown
    ((skipped),) = found["ports"][0]["skipped"]
    assert (skipped["address"], skipped["reason"]) == (address, "invalid-address")


def test_an_invalid_port_of_a_slice_is_named() -> None:
    """Other ports of the slice are used."""
    ports = [{"name": "", "port": 8080}, {"name": "metrics", "port": 70000}]
    spec = {"clusterIP": "10.96.0.1", "ports": [{"name": "", "port": 80}, {"name": "metrics", "port": 81}]}
    shown, _ = explained({"spec": spec}, "10.244.1.1", slice_ports=ports)
    assert "100% 10.244.1.1:8080 ready" in shown
    assert "slice web-1: it has an invalid port" in shown


def test_a_load_balancer_without_a_valid_source_range_is_open_to_nobody() -> None:
    """Its node port is not filtered."""
    spec = {
        "clusterIP": "10.96.0.1",
        "ports": [{"port": 80, "nodePort": 30080}],
        "loadBalancerSourceRanges": ["10.0.0.0/33"],
    }
    status = {"loadBalancer": {"ingress": [{"ip": "192.0.2.2"}]}}
    shown, found = explained({"spec": spec, "status": status}, "10.244.1.1")
    assert "The field spec.loadBalancerSourceRanges[0] is '10.0.0.0/33', not a network" in shown
    assert "The load balancer's IPs are open to nobody; node ports are open to all." in shown
    assert found["ports"][0]["sourceRanges"] == []


def test_an_address_of_the_api_server_is_named_with_its_port() -> None:
    """The other port of the same Service is served there."""
    ports = [{"name": "", "port": 6443}, {"name": "other", "port": 80}]
    spec = {"clusterIP": "10.96.0.1", "ports": ports, "externalIPs": ["192.0.2.1"]}
    status = {"loadBalancer": {"ingress": [{"ip": "192.0.2.2"}]}}
    servers = frozenset({("192.0.2.1", 6443), ("192.0.2.2", 6443)})
    shown, found = explained({"spec": spec, "status": status}, "10.244.1.1", api_servers=servers)
    assert "192.0.2.1:6443 is not served: this node reaches the API server there." in shown
    assert "External IP 192.0.2.1:80 and load balancer 192.0.2.2:80 lead to" in shown
    message = "this node reaches the API server there"
    assert found["skippedValues"] == [
        {
            "field": field,
            "value": ip,
            "port": 6443,
            "message": message,
        }
        for field, ip in (("spec.externalIPs", "192.0.2.1"), ("status.loadBalancer.ingress", "192.0.2.2"))
    ]
