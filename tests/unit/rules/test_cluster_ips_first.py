"""No Service can take over the cluster IP of another one (CVE-2020-8554)."""

import time

import pytest

from pykubeproxy.config import Dispatch, load
from pykubeproxy.objects import Family, Updated
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.dispatch import shared_chain
from pykubeproxy.rules.render import render
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.rules.skeleton import NAT_SERVICES
from pykubeproxy.services.cluster import Cluster
from tests.objects import service, slice_of
from tests.packet_model import Packet, Walker
from tests.strategies import NODE

DNS = "10.96.0.10"


def rendered(dispatch: str) -> Ruleset:
    """A victim with many neighbours, and thieves before and after it by name that claim its cluster IP."""
    cluster = Cluster()
    many = [service(f"n{n}", cluster_ip=f"10.96.1.{n}") for n in range(1, 250)]
    thieves = [
        service("aaa", cluster_ip="10.96.0.66", external_ips=(DNS,)),
        service("zzz", cluster_ip="10.96.0.67", load_balancer_ips=(DNS,), type="LoadBalancer"),
    ]
    for number, it in enumerate([service("dns", cluster_ip=DNS), *thieves, *many]):
        cluster.apply(Updated(it))
        cluster.apply(Updated(slice_of(f"10.244.{1 + number // 250}.{number % 250 + 1}", service=it.name)))
    config = load(None, {"dispatch": dispatch}).config
    return render(cluster, rule_context(config, NODE, None, KernelFacts(), Family.IPV4))


@pytest.mark.parametrize("dispatch", ["flat", "tree", "auto"])
def test_cluster_ip_cannot_be_taken_over(dispatch: str) -> None:
    """Clients reach the Service's own endpoint, not that of a Service with the IP as external or load balancer IP."""
    packet = Packet("10.244.1.77", DNS, "tcp", 80)
    outcomes = Walker(rendered(dispatch)).walk(packet, "nat", "KUBE-SERVICES")
    assert [outcome.verdict for outcome in outcomes] == ["to 10.244.1.1:8080"]


@pytest.mark.parametrize("dispatch", ["flat", "tree"])
@pytest.mark.parametrize("first", ["aaa", "zzz"])
def test_one_cluster_ip_in_two_services(dispatch: str, first: str) -> None:
    """Files may assign a cluster IP twice: the first Service by name serves it, in any order of events."""
    cluster = Cluster()
    pods = {"aaa": "10.244.1.1", "zzz": "10.244.1.2"}
    for name in sorted(pods, reverse=first == "zzz"):
        cluster.apply(Updated(service(name, cluster_ip=DNS)))
        cluster.apply(Updated(slice_of(pods[name], service=name)))
    config = load(None, {"dispatch": dispatch}).config
    rules = render(cluster, rule_context(config, NODE, None, KernelFacts(), Family.IPV4))
    outcomes = Walker(rules).walk(Packet("10.244.1.77", DNS, "tcp", 80), "nat", "KUBE-SERVICES")
    assert [outcome.verdict for outcome in outcomes] == ["to 10.244.1.1:8080"]


def test_many_ports_at_one_address() -> None:
    """The tree handles many ports at one address in linear time."""
    rules = tuple(
        f'-d {DNS}/32 -p tcp -m comment --comment "a/b cluster IP" -m tcp --dport {port} -j KUBE-SVC-X'
        for port in range(1, 60_001)
    )
    begun = time.process_time()
    tree = shared_chain(NAT_SERVICES, [((NAT_SERVICES, rules),)], (), Dispatch.TREE)
    assert len(tree.root) == 1
    assert sum(len(texts) - 1 for _, texts in tree.chains) == len(rules) + len(tree.chains) - 1
    assert time.process_time() - begun < 5
