"""The addresses of a network namespace."""

import queue
import time

import pyroute2
import pytest
from pyroute2.netlink.exceptions import NetlinkError

from pykubeproxy.kernel import AddressWatch, KernelError, LocalAddress, Runner, local_addresses
from pykubeproxy.objects import Family

pytestmark = pytest.mark.root


@pytest.fixture
def ip(inside: str, runner: Runner):
    """Runs `ip` in the namespace, which has a link eth9."""

    def run(*words: str) -> None:
        outcome = runner.run(("ip", *words))
        assert outcome.exit_code == 0, outcome.stderr

    run("link", "set", "lo", "up")
    run("link", "add", "eth9", "type", "veth", "peer", "name", "far9")
    return run


def test_each_family(ip) -> None:
    """Addresses come with their prefix length and interface, each family by itself."""
    ip("addr", "add", "192.168.99.10/24", "dev", "eth9")
    ip("addr", "add", "10.244.1.1/24", "dev", "eth9")
    ip("addr", "add", "fd00:99::10/64", "dev", "eth9", "nodad")
    assert local_addresses(Family.IPV4) == (
        LocalAddress("10.244.1.1", 24, "eth9"),
        LocalAddress("127.0.0.1", 8, "lo"),
        LocalAddress("192.168.99.10", 24, "eth9"),
    )
    assert set(local_addresses(Family.IPV6)) == {
        LocalAddress("::1", 128, "lo"),
        LocalAddress("fd00:99::10", 64, "eth9"),
    }


def test_point_to_point(ip) -> None:
    """On a point-to-point link it is this end's address that counts."""
    ip("addr", "add", "10.1.1.1", "peer", "10.1.1.2/32", "dev", "eth9")
    assert LocalAddress("10.1.1.1", 32, "eth9") in local_addresses(Family.IPV4)


@pytest.mark.parametrize(
    "error", [OSError(24, "Too many open files"), NetlinkError(16, "Device or resource busy")]
)
def test_addresses_that_cannot_be_read(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the socket or the kernel says comes as an error of this package, which the agent gets over."""

    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(pyroute2.IPRoute, "__enter__", fail)
    with pytest.raises(KernelError, match=r"addresses of this node cannot be read: .*(open files|busy)"):
        local_addresses(Family.IPV4)


def test_watch(ip) -> None:
    """A change is told within a moment, in either family; after the end there is silence."""
    told: queue.Queue[float] = queue.Queue()
    watch = AddressWatch(lambda: told.put(time.monotonic()))
    for words in (
        ("addr", "add", "10.2.2.2/24", "dev", "eth9"),
        ("addr", "del", "10.2.2.2/24", "dev", "eth9"),
        ("addr", "add", "fd00::2/64", "dev", "eth9", "nodad"),
    ):
        ip(*words)
        told.get(timeout=5)
    watch.close()
    while not told.empty():
        told.get()
    ip("addr", "add", "10.3.3.3/24", "dev", "eth9")
    assert told.empty()
    assert LocalAddress("10.3.3.3", 24, "eth9") in local_addresses(Family.IPV4)


def test_watch_sees_its_own_namespace_only(ip) -> None:
    """Changes elsewhere are not told."""
    told: queue.Queue[None] = queue.Queue()
    watch = AddressWatch(lambda: told.put(None))
    elsewhere = Runner(("unshare", "-n"))
    assert elsewhere.run(("sh", "-c", "ip link set lo up && ip addr add 10.9.9.9/8 dev lo")).exit_code == 0
    assert told.empty()
    watch.close()
