"""Delete native nftables tables."""

import sys
from collections.abc import Iterator

import pytest

from pykubeproxy.kernel import Runner, nftables
from pykubeproxy.objects import Family

pytestmark = pytest.mark.root

TABLES = """
table ip kube-proxy {
    set nodes { type ipv4_addr; }
    chain b { ip daddr @nodes accept; }
    chain a { type nat hook prerouting priority 0; jump b; }
}
table ip6 kube-proxy {
    chain a { type filter hook input priority 0; }
}
table inet kube-proxy { }
table ip kube-proxy-mine { }
table ip nat { }
"""


@pytest.fixture
def tables(inside: str, runner: Runner) -> Iterator[Runner]:
    """Both families' tables as a kube-proxy in nftables mode leaves them, and tables of others."""
    assert runner.run(("nft", "-f", "-"), TABLES).exit_code == 0
    yield runner


def present(runner: Runner) -> list[str]:
    return sorted(runner.run(("nft", "list", "tables")).stdout.splitlines())


def test_removes_a_table_with_its_contents(tables: Runner) -> None:
    """Only the table of that family and name; the second time there is none."""
    assert nftables.remove_table(Family.IPV4, "kube-proxy")
    left = ["table inet kube-proxy", "table ip kube-proxy-mine", "table ip nat"]
    assert present(tables) == [*left, "table ip6 kube-proxy"]
    assert nftables.remove_table(Family.IPV6, "kube-proxy")
    assert present(tables) == left
    assert not nftables.remove_table(Family.IPV4, "kube-proxy")


def test_removing_needs_cap_net_admin(tables: Runner) -> None:
    """Without CAP_NET_ADMIN it raises, and the table stays."""
    program = (
        "from pykubeproxy.kernel import nftables; from pykubeproxy.objects import Family\n"
        "nftables.remove_table(Family.IPV4, 'kube-proxy')"
    )
    limited = Runner((*tables.prefix, "setpriv", "--inh-caps=-all", "--bounding-set=-all"))
    outcome = limited.run((sys.executable, "-c", program))
    assert "Operation not permitted" in outcome.stderr
    assert "table ip kube-proxy" in present(tables)
