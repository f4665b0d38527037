"""Explain a Service on all nodes, from the objects of conformance cases."""

import json

import click
import msgspec
import pytest

from pykubeproxy.inspect.explain.model import ExplainedGroup, explain_all
from pykubeproxy.inspect.explain.report import ExplainReport, explain_report
from pykubeproxy.inspect.routes import Policy
from pykubeproxy.inspect.targets import parse_filter
from pykubeproxy.inspect.trace.journey import MOST_RECEIVERS, receivers
from pykubeproxy.objects import (
    Endpoint,
    EndpointPort,
    EndpointSlice,
    Family,
    Kind,
    Listed,
    Node,
    Protocol,
    Updated,
)
from pykubeproxy.report.document import document, json_text
from pykubeproxy.report.text import text
from pykubeproxy.services.ports import FrontendKind, PortName
from tests import cases
from tests.fakes.three_nodes import ThreeNodes

WEB = PortName("ns1", "web", "http", "TCP")


def groups(nodes: ThreeNodes, policy: Policy) -> tuple[ExplainedGroup, ...]:
    (port,) = nodes.explained("ns1/web").ports
    return next(it.groups for it in port.policies if it.policy is policy)


def names(group: ExplainedGroup) -> tuple[str, ...]:
    return tuple(it.name for it in group.nodes)


def report_of(nodes: ThreeNodes) -> ExplainReport:
    return explain_report([nodes.explained("ns1/web")], nodes.nodes, settings_known=False)


def plain(nodes: ThreeNodes) -> str:
    return click.unstyle(text(report_of(nodes).blocks(wide=False)))


def test_many_nodes_with_the_same_answer_are_one_group() -> None:
    nodes = ThreeNodes("lb-local")
    nodes.nodes += [Node(f"worker{number}") for number in range(197)]
    assert [len(group.nodes) for group in groups(nodes, Policy.CLUSTER)] == [200]
    assert [names(group)[:2] for group in groups(nodes, Policy.LOCAL)] == [
        ("node1",),
        ("node2",),
        ("node3", "worker0"),
    ]
    assert "On every node (200):" in plain(nodes)
    assert "On node3, worker0, worker1, worker2 and 194 more nodes:\n      dropped: all usable" in plain(
        nodes
    )


def test_zones_with_other_hints_are_other_groups() -> None:
    found = groups(ThreeNodes("topology-zone"), Policy.CLUSTER)
    used = {names(group): [it.target for it in group.endpoints if it.used] for group in found}
    assert used == {
        ("node1",): ["10.244.1.11:8080", "10.244.3.13:8080"],
        ("node2",): ["10.244.2.12:8080"],
        ("node3",): ["10.244.1.11:8080", "10.244.2.12:8080", "10.244.3.13:8080"],
    }


@pytest.mark.parametrize("case", [name for name in cases.NAMES if "random" not in name])
def test_each_node_gets_the_answer_of_its_own_explanation(case: str) -> None:
    """Grouping nodes before they are explained loses no difference."""
    nodes = ThreeNodes(case)
    for service in nodes.cluster.services():
        for port in nodes.explained(str(service.key)).ports:
            of_node = {
                (name, policy.policy): group
                for policy in port.policies
                for group in policy.groups
                for name in names(group)
            }
            for node in nodes.nodes:
                query = parse_filter(str(service.key))
                (expected,) = explain_all(nodes.cluster, query, nodes.contexts(node))
                (alone,) = (it for it in expected.ports if (it.name, it.family) == (port.name, port.family))
                for policy in alone.policies:
                    found = of_node[node.name, policy.policy]
                    assert policy.groups == (msgspec.structs.replace(found, nodes=()),)


def test_service_without_rules_says_why() -> None:
    assert plain(ThreeNodes("headless")) == (
        "ns1/web\n  It has no rules: it is headless, so clients go to its pods directly.\n"
    )


@pytest.mark.parametrize(
    "case", ["lb-local", "topology-zone", "no-endpoints", "headless", "lb-source-ranges"]
)
def test_text_fits_into_80_columns(case: str) -> None:
    assert max(map(len, plain(ThreeNodes(case)).splitlines())) <= 80


def test_json_has_a_group_for_each_answer() -> None:
    made = json.loads(json_text(document(report_of(ThreeNodes("lb-local")))))
    ((port,),) = (service["ports"] for service in made["services"])
    cluster, local = port["policies"]
    assert [len(group["nodes"]) for group in cluster["groups"]] == [3]
    assert [(group["nodes"], group["verdict"]) for group in local["groups"]] == [
        ([{"name": "node1", "zone": "zone-a"}], "dnat"),
        ([{"name": "node2", "zone": "zone-b"}], "dnat"),
        ([{"name": "node3", "zone": "zone-c"}], "drop"),
    ]
    assert local["groups"][0]["endpoints"][1]["reason"] == "not-local"


def test_of_many_nodes_with_endpoints_of_their_own_some_are_read_and_shown() -> None:
    nodes = ThreeNodes("lb-local")
    names = [f"worker{number:02}" for number in range(15)]
    nodes.nodes = [Node(name) for name in (*names, "empty")]
    nodes.cluster.apply(Listed(Kind.ENDPOINT_SLICE, ()))
    endpoints = tuple(Endpoint(f"10.244.7.{n + 1}", node_name=name) for n, name in enumerate(names))
    ports = (EndpointPort("http", Protocol.TCP, 8080),)
    nodes.cluster.apply(Updated(EndpointSlice("ns1", "web-1", "web", Family.IPV4, endpoints, ports)))
    found = receivers([nodes.explained("ns1/web")], WEB, Family.IPV4, FrontendKind.LOAD_BALANCER_IP)
    assert [it.node for it in found] == [*names[:MOST_RECEIVERS], None, "empty"]
    assert found[MOST_RECEIVERS].others == tuple(names[MOST_RECEIVERS:])
    assert (
        "and 3 more nodes with other endpoints (--node shows one, -o wide all)\n    On empty, zone unknown:\n"
        in plain(nodes)
    )
