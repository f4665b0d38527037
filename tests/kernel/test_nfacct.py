"""Named packet counters."""

import sys

import pytest

from pykubeproxy.kernel import Backend, Runner, nfacct, open_iptables
from pykubeproxy.objects import Family

pytestmark = pytest.mark.root


def test_made_once(inside: str) -> None:
    """A counter is made where there is none, and left alone where there is one."""
    assert nfacct.read("drops") is None
    assert nfacct.ensure("drops") == nfacct.ensure("drops") == nfacct.Ensured(True)
    assert nfacct.read("drops") == nfacct.Counter(0, 0)


def test_counts(inside: str, runner: Runner) -> None:
    """It counts what its rules see, and making it again does not set it back."""
    assert nfacct.ensure("pings").ok
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
    assert nfacct.ensure("pings").ok
    assert nfacct.read("pings") == counted


def test_each_namespace_has_its_own(inside: str, runner: Runner) -> None:
    """A counter made here is not there elsewhere."""
    assert nfacct.ensure("here").ok
    snippet = "from pykubeproxy.kernel import nfacct; print(nfacct.read('here'))"
    assert Runner(("unshare", "-n")).run((sys.executable, "-c", snippet)).stdout == "None\n"


def test_name_too_long(inside: str) -> None:
    """A name that the kernel does not take is a reason, not an exception."""
    made = nfacct.ensure("x" * 40)
    assert not made.ok
    assert "nfnetlink_acct" in made.reason


def test_not_permitted(runner: Runner) -> None:
    """Without CAP_NET_ADMIN there is a reason as well."""
    limited = Runner((*runner.prefix, "setpriv", "--inh-caps=-all", "--bounding-set=-all"))
    snippet = "from pykubeproxy.kernel import nfacct; print(*nfacct.ensure('drops'), nfacct.read('drops'))"
    said = limited.run((sys.executable, "-c", snippet)).stdout
    assert said == "False no permission to make nfacct counters (CAP_NET_ADMIN) None\n"
