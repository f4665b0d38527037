"""The lab's network without any proxy rules."""

import itertools
import os
from collections.abc import Iterator

import pytest

from pykubeproxy.lab.api import PODS, SLICES, in_namespace
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.network import CLIENT

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab without agents."""
    with Lab(f"tn{os.getpid()}", agents=False) as lab:
        yield lab


@pytest.mark.parametrize("family", [4, 6])
def test_hosts_reach_every_pod(lab: Lab, family: int) -> None:
    """Pods, nodes and the client reach each pod over TCP and UDP with their own addresses."""
    lab.reset()
    pods = lab.deploy("web", 3)
    sources = [(node.prober, node.addresses[family == 6]) for node in lab.nodes.values()]
    sources.append((lab.client.prober, CLIENT[family == 6]))
    sources += [(pod.prober, pod.addresses[family == 6]) for pod in pods]
    for (prober, address), pod in itertools.product(sources, pods):
        if prober._namespace is pod.namespace:
            continue  # a pod that calls itself may use another source address
        for result in (prober.tcp(pod.target(family)), prober.udp(pod.target(family))):
            assert result.pods == {pod.name: 1}
            assert set(result.clients) == {address}


def test_slices_follow_pod_status(lab: Lab) -> None:
    """The EndpointSlices have each change of a pod's status when the call returns."""
    lab.reset()
    (pod,) = lab.deploy("web", 1, gates=["outside"])
    lab.service("web")

    def conditions() -> list[tuple[bool, bool, bool]]:
        return [
            (status["ready"], status["serving"], status["terminating"])
            for slice_ in lab.api.items(SLICES)
            for status in (endpoint["conditions"] for endpoint in slice_["endpoints"])
        ]

    assert conditions() == [(False, False, False)] * 2, "the gate is closed; one slice for each family"
    pod.open_gate("outside")
    assert conditions() == [(True, True, False)] * 2
    pod.set_answering(False)
    assert conditions() == [(False, False, False)] * 2
    pod.set_answering(True)
    pod.mark_terminating()
    assert conditions() == [(False, True, True)] * 2
    pod.kill()
    lab.remove_pod(pod)
    assert conditions() == []


def test_pod_objects_follow_pod_status(lab: Lab) -> None:
    """The Pod objects have each change of a pod's status when the call returns, with the name in EndpointSlices."""
    lab.reset()
    (pod,) = lab.deploy("web", 1)
    lab.service("web")
    path = in_namespace(PODS, "default")
    (endpoint,) = lab.api.items(SLICES)[0]["endpoints"]

    def ready() -> str:
        found = lab.api.call("GET", f"{path}/{endpoint['targetRef']['name']}")
        assert found["spec"]["nodeName"] == endpoint["nodeName"]
        assert [it["ip"] for it in found["status"]["podIPs"]] == list(pod.addresses)
        return str({it["type"]: it["status"] for it in found["status"]["conditions"]}["Ready"])

    assert ready() == "True"
    pod.set_answering(False)
    assert ready() == "False"
    pod.mark_terminating()
    assert "deletionTimestamp" in lab.api.items(path)[0]["metadata"]
    pod.kill()
    lab.remove_pod(pod)
    assert lab.api.items(path) == []


def test_stopped_pod_refuses_connections(lab: Lab) -> None:
    """Connections to a stopped pod are refused at once."""
    lab.reset()
    (pod,) = lab.deploy("web", 1)
    lab.stop_pod(pod)
    for family in (4, 6):
        result = lab.nodes["node2"].prober.tcp(pod.target(family), 20)
        assert result.errors == {"refused": 20}
        assert result.slowest < 0.5


def test_pod_serves_while_it_lingers(lab: Lab) -> None:
    """A pod with a linger time serves after SIGTERM, then ends."""
    lab.reset()
    (pod,) = lab.deploy("web", 1, linger=0.5)
    stream = lab.client.prober.stream(pod.target(), pause=0.01)
    pod.terminate()
    assert lab.client.prober.tcp(pod.target(), 20).pods == {"web-1": 20}
    pod.wait_ended()
    assert stream.stop().pods["web-1"] > 20
    assert lab.client.prober.tcp(pod.target()).errors == {"refused": 1}


def test_cluster_ip_fails_without_rules(lab: Lab) -> None:
    """Without rules a cluster IP does not answer, so answers in scenarios prove the agent's rules."""
    lab.reset()
    lab.deploy("web", 1)
    vip = lab.service("web").vip()
    assert not lab.nodes["node1"].prober.tcp(vip, 3, timeout=0.2).pods
