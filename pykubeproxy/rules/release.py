"""Find the rules of any service proxy that redirect or reject this node's connections to its API servers."""

from collections.abc import Collection

from pykubeproxy.rules import skeleton
from pykubeproxy.rules.dispatch import with_branches
from pykubeproxy.rules.ownership import is_ours
from pykubeproxy.rules.parse import parse_rule
from pykubeproxy.rules.restore_text import block, join
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.ports import ApiServers

# The chains of table filter above rules for external addresses, and the ends of comments of such rules in table nat.
_FILTER = (skeleton.FILTER_EXTERNAL, skeleton.FILTER_FIREWALL)
_COMMENTS = (" external IP", " loadbalancer IP")


def release_input(live: Ruleset, servers: ApiServers) -> str:
    """Return the restore input that deletes these rules, except those of cluster IPs; "" if there are none."""
    external = {it for key in _FILTER for it in with_branches(live, key)}
    found = [
        (key, rule)
        for key, rules in live.chains.items()
        if is_ours(key)
        for rule in rules
        if "--dport" in rule and _is_external(key, rule, servers, external)
    ]
    return "".join(
        block(table, join(f"-D {key.chain} {rule}" for key, rule in found if key.table == table))
        for table in ("nat", "filter")
    )


def _is_external(key: ChainKey, text: str, servers: ApiServers, external: Collection[ChainKey]) -> bool:
    rule = parse_rule(text)
    if rule.protocol != "TCP" or (rule.destination, rule.port) not in servers:
        return False
    return rule.comment.endswith(_COMMENTS) if key.table == "nat" else key in external
