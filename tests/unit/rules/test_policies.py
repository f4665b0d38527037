"""The policies of built-in chains in iptables-save output."""

from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey, parse

SAVED = """*filter
:INPUT ACCEPT [1:2]
:FORWARD DROP [0:0]
:OUTPUT ACCEPT
:MINE - [0:0]
:BARE
COMMIT
"""


def test_policies() -> None:
    """Policies other than ACCEPT are kept; other chains have none."""
    ruleset = parse(Family.IPV4, SAVED)
    assert ruleset.policies == {ChainKey("filter", "FORWARD"): "DROP"}
    assert set(ruleset.chains) == {
        ChainKey("filter", chain) for chain in ("INPUT", "FORWARD", "OUTPUT", "MINE", "BARE")
    }
