"""The digests that the agent keeps instead of rules.

A digest is Python's hash() of a chain's rules. Its key differs in every process, so digests never leave the process.
In the chains of services, comments do not count: a large cluster omits some of them, and a chain keeps those it has until
another reason to write it.
"""

from pykubeproxy.rules import names
from pykubeproxy.rules.iptables_save import without_comment
from pykubeproxy.rules.ruleset import ChainKey, Rules

# The digest of a missing chain; hash() never returns it.
ABSENT = -1
EMPTY = hash(())
# iptables-legacy keeps a table as entries: one for a rule, two for a chain that is not built in.
CHAIN_ENTRIES = 2


def comparable(key: ChainKey, rules: Rules) -> Rules:
    """Return the rules of a chain without the comments that do not count."""
    if key.table != "nat" or not names.is_owned(key.chain):
        return rules
    return tuple([without_comment(rule) for rule in rules])


def digest(key: ChainKey, rules: Rules) -> int:
    """Return the digest of a chain."""
    return hash(comparable(key, rules))
