"""Faults of `lab break`: what clients notice of each, and that `mend` removes it."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from pykubeproxy.lab.cluster import Lab, LabService
from pykubeproxy.lab.faults import APP, FAULTS, NARROW, Fault, break_lab, mend
from pykubeproxy.lab.pods import LabPod, workload
from pykubeproxy.lab.prober import ProbeTarget

pytestmark = pytest.mark.root

# What the client notices; the other half of its connections goes to a pod on its own node.
SYMPTOMS = {
    "link": "timed out",
    "port": "refused",
    "iptables": "timed out",
    "nftables": "timed out",
    "asymmetric": "timed out",
    "mtu": "",
    "stale": "refused",
    "conntrack": "timed out",
}
# The table of a node is one for both families, and filling it takes a second.
CASES = [(fault, family) for fault in FAULTS for family in (4, 6) if (fault.name, family) != ("conntrack", 6)]
CONNECTIONS = 30  # all to one of two pods by chance: below 1e-8


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab with a pod of the Service on each node, and a client on node1."""
    with Lab(f"tf{os.getpid()}") as lab:
        lab.deploy(APP, 2)
        lab.start_pod("client", "client", "node1", workload("client")).wait_answering()
        yield lab


@pytest.fixture(scope="module")
def service(lab: Lab) -> LabService:
    return lab.service(APP)


def answered(client: LabPod, target: ProbeTarget, size: int) -> bool:
    """Whether a request of so many bytes gets an answer."""
    with (
        client.namespace.entered(),
        suppress(TimeoutError),
        socket.create_connection(target, 0.3) as connection,
    ):
        connection.sendall(b"GET /%b HTTP/1.0\r\n\r\n" % (b"a" * size))
        return bool(connection.recv(1))
    return False


@pytest.mark.parametrize(
    ("fault", "family"), CASES, ids=[f"{fault.name}-{family}" for fault, family in CASES]
)
def test_fault(lab: Lab, service: LabService, fault: Fault, family: int) -> None:
    client, target = lab.pods["client"], service.vip(family)
    expected = {SYMPTOMS[fault.name]} - {""}

    def works() -> bool:
        return not client.prober.tcp(target, CONNECTIONS, timeout=0.2).failed

    def is_broken() -> bool:
        found = client.prober.tcp(target, 8, timeout=0.2)
        assert set(found.errors) <= expected
        return set(found.errors) == expected

    lab.until(works, "web answers")
    break_lab(lab, fault)
    lab.until(is_broken, f"connections end with {expected}")
    (far,) = (pod for pod in lab.pods.values() if pod.app == APP and pod.site.name == "node2")
    if fault.name == "mtu":
        sizes = (NARROW // 2, NARROW)
        assert [answered(client, far.target(family), size) for size in sizes] == [True, False]
    mend(lab)
    lab.until(works, "web answers again")


def test_all_faults_at_once_are_mended(lab: Lab, service: LabService) -> None:
    client, target = lab.pods["client"], service.vip()
    for fault in FAULTS:
        break_lab(lab, fault)
        break_lab(lab, fault)
    mend(lab)
    mend(lab)
    lab.until(lambda: not client.prober.tcp(target, CONNECTIONS, timeout=0.2).failed, "web answers again")
