"""Read and destroy ipsets."""

import errno
import os
import sys

import pytest

from pykubeproxy.kernel import Backend, Runner, ipset, open_iptables
from pykubeproxy.objects import Family
from tests.fakes import ipvs_mode

pytestmark = pytest.mark.root


def test_names_and_ports(inside: str) -> None:
    """A set without ports has none, and so has a set that does not exist."""
    assert ipset.names() == frozenset()
    ipvs_mode.create_ipsets("mine")
    assert ipset.names() == {*ipvs_mode.SETS, "mine"}
    assert ipset.ports("KUBE-NODE-PORT-TCP") == {ipvs_mode.NODE_PORT}
    assert ipset.ports("mine") == ipset.ports("none") == frozenset()


def test_a_set_in_use_is_busy(inside: str, runner: Runner) -> None:
    """Without the rule, it can be destroyed; again does no harm."""
    ipvs_mode.create_ipsets()
    iptables = open_iptables(Backend.NFT, Family.IPV4, runner)
    iptables.restore("*filter\n-A INPUT -m set --match-set KUBE-CLUSTER-IP dst,dst -j DROP\nCOMMIT\n")
    with pytest.raises(OSError, match=os.strerror(errno.EBUSY)):
        ipset.destroy("KUBE-CLUSTER-IP")
    iptables.restore("*filter\n-F INPUT\nCOMMIT\n")
    for _ in range(2):
        ipset.destroy("KUBE-CLUSTER-IP")
        assert "KUBE-CLUSTER-IP" not in ipset.names()


def test_missing_permission_is_an_error(runner: Runner) -> None:
    snippet = "from pykubeproxy.kernel import ipset; ipset.names()"
    limited = Runner((*runner.prefix, "setpriv", "--inh-caps=-all", "--bounding-set=-all"))
    assert "PermissionError" in limited.run((sys.executable, "-c", snippet)).stderr
