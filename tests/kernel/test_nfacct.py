"""Create and read nfacct counters."""

import sys

import pytest

from pykubeproxy.kernel import Backend, Runner, nfacct, open_iptables
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import Count

pytestmark = pytest.mark.root


def test_creates_a_counter_once(inside: str) -> None:
    """An existing counter is left alone."""
    assert nfacct.read("drops") is None
    assert nfacct.ensure("drops") == nfacct.ensure("drops") == ""
    assert nfacct.read("drops") == Count(0, 0)


def test_counter_keeps_its_count(inside: str, runner: Runner) -> None:
    """Ensuring a counter again does not reset it."""
    assert nfacct.ensure("pings") == ""
    iptables = open_iptables(Backend.NFT, Family.IPV4, runner)
    iptables.restore("*filter\n-A OUTPUT -m nfacct --nfacct-name pings\nCOMMIT\n")
    runner.run(("ip", "link", "set", "lo", "up"))
    sent = (
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'12345', ('127.0.0.1', 9))"
    )
    assert runner.run((sys.executable, "-c", sent)).exit_code == 0
    counted = nfacct.read("pings")
    assert counted
    assert counted.packets >= 1
    assert counted.bytes >= 33
    assert nfacct.ensure("pings") == ""
    assert nfacct.read("pings") == counted


def test_counters_belong_to_the_namespace(inside: str, runner: Runner) -> None:
    """A counter does not exist in another network namespace."""
    assert nfacct.ensure("here") == ""
    snippet = "from pykubeproxy.kernel import nfacct; print(nfacct.read('here'))"
    assert Runner(("unshare", "-n")).run((sys.executable, "-c", snippet)).stdout == "None\n"


def test_invalid_name_is_a_reason(inside: str) -> None:
    """A name that the kernel rejects gives a reason, not an exception."""
    assert "nfnetlink_acct" in nfacct.ensure("x" * 40)


def test_missing_capability_is_a_reason(runner: Runner) -> None:
    """Without CAP_NET_ADMIN, the reason says so."""
    limited = Runner((*runner.prefix, "setpriv", "--inh-caps=-all", "--bounding-set=-all"))
    snippet = "from pykubeproxy.kernel import nfacct; print(nfacct.ensure('drops'), nfacct.read('drops'))"
    output = limited.run((sys.executable, "-c", snippet)).stdout
    assert (
        output
        == "cannot create the nfacct counter drops: Operation not permitted; run as root or with CAP_NET_ADMIN None\n"
    )
