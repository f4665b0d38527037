"""Read and watch the addresses of a network namespace."""

import queue

import pyroute2
import pytest
from pyroute2.netlink.exceptions import NetlinkError

from pykubeproxy.kernel import KernelError, Runner, local_addresses, watch_addresses
from pykubeproxy.kernel.addresses import LocalAddress
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


def test_lists_addresses_by_family(ip) -> None:
    """Each address has its prefix length and interface."""
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


def test_point_to_point_link_gives_the_local_address(ip) -> None:
    """The peer's address is not listed."""
    ip("addr", "add", "10.1.1.1", "peer", "10.1.1.2/32", "dev", "eth9")
    assert LocalAddress("10.1.1.1", 32, "eth9") in local_addresses(Family.IPV4)


@pytest.mark.parametrize(
    "error", [OSError(24, "Too many open files"), NetlinkError(16, "Device or resource busy")]
)
def test_netlink_failure_is_a_kernel_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the socket and of the kernel both become KernelError."""

    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(pyroute2.IPRoute, "__enter__", fail)
    with pytest.raises(KernelError, match=r"cannot read the addresses of this node: .*(open files|busy)"):
        local_addresses(Family.IPV4)


def test_watch_reports_changes_of_both_families(ip) -> None:
    """Each change is reported within a moment."""
    changes: queue.Queue[None] = queue.Queue()
    watch_addresses(lambda: changes.put(None))
    for words in (
        ("addr", "add", "10.2.2.2/24", "dev", "eth9"),
        ("addr", "del", "10.2.2.2/24", "dev", "eth9"),
        ("addr", "add", "fd00::2/64", "dev", "eth9", "nodad"),
    ):
        ip(*words)
        changes.get(timeout=5)


def test_watch_ignores_other_namespaces(ip) -> None:
    """Changes in another network namespace are not reported."""
    changes: queue.Queue[None] = queue.Queue()
    watch_addresses(lambda: changes.put(None))
    elsewhere = Runner(("unshare", "-n"))
    assert elsewhere.run(("sh", "-c", "ip link set lo up && ip addr add 10.9.9.9/8 dev lo")).exit_code == 0
    assert changes.empty()
