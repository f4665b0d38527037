"""What the lab's network is before any rule is written."""

import itertools
import os
from collections.abc import Iterator

import pytest

from pykubeproxy.lab.api import SLICES
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.network import CLIENT

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab without agents."""
    with Lab(f"tn{os.getpid()}", agents=False) as lab:
        yield lab


@pytest.mark.parametrize("family", [4, 6])
def test_everybody_reaches_every_pod(lab: Lab, family: int) -> None:
    """Pods, nodes and the client reach each pod directly, TCP and UDP, with their own addresses."""
    lab.reset()
    pods = lab.deploy("web", 3)
    places = [(place.prober, place.addresses[family == 6]) for place in lab.nodes.values()]
    places.append((lab.client.prober, CLIENT[family == 6]))
    places += [(pod.prober, pod.identity.addresses[family == 6]) for pod in pods]
    for (prober, address), pod in itertools.product(places, pods):
        if prober._namespace is pod.namespace:
            continue  # whom a pod sees that asks itself is its own affair
        for seen in (prober.tcp(pod.target(family)), prober.udp(pod.target(family))):
            assert seen.pods == {pod.name: 1}
            assert set(seen.clients) == {address}


def test_readiness_reaches_the_slices(lab: Lab) -> None:
    """What a pod says of itself, and what befalls it, stands in the EndpointSlices when the call returns."""
    lab.reset()
    (pod,) = lab.deploy("web", 1, gates=["outside"])
    lab.service("web")

    def conditions() -> list[tuple[bool, bool, bool]]:
        return [
            (said["ready"], said["serving"], said["terminating"])
            for slice_ in lab.api.items(SLICES)
            for said in (endpoint["conditions"] for endpoint in slice_["endpoints"])
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


def test_a_pod_that_is_gone_refuses(lab: Lab) -> None:
    """Who connects to a pod that ended is refused at once."""
    lab.reset()
    (pod,) = lab.deploy("web", 1)
    lab.stop_pod(pod)
    for family in (4, 6):
        seen = lab.nodes["node2"].prober.tcp(pod.target(family), 20)
        assert seen.errors == {"refused": 20}
        assert seen.slowest < 0.5


def test_linger(lab: Lab) -> None:
    """A pod with a linger time serves on after SIGTERM, then it is gone."""
    lab.reset()
    (pod,) = lab.deploy("web", 1, linger=0.5)
    stream = lab.client.prober.stream(pod.target(), pause=0.01)
    pod.terminate()
    assert lab.client.prober.tcp(pod.target(), 20).pods == {"web-1": 20}
    pod.wait_gone()
    assert stream.stop().pods["web-1"] > 20
    assert lab.client.prober.tcp(pod.target()).errors == {"refused": 1}


def test_service_addresses_without_rules(lab: Lab) -> None:
    """Without rules a cluster IP leads nowhere: what a scenario reaches there, an agent programmed."""
    lab.reset()
    lab.deploy("web", 1)
    vip = lab.service("web").vip()
    assert not lab.nodes["node1"].prober.tcp(vip, 3, timeout=0.2).pods
