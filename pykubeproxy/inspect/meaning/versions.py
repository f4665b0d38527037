"""What older versions of kube-proxy do otherwise by design."""

from collections.abc import Container

import msgspec

from pykubeproxy.inspect.meaning.model import Meaning, MeaningChange, Outcome, Part, same_meaning
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.inspect.trace.packet import Host
from pykubeproxy.rules import names
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

_PROXY_FIREWALL = ChainKey("filter", names.PROXY_FIREWALL)
_MARK_DROP = ChainKey("nat", "KUBE-MARK-DROP")


def is_of_older_version(
    change: MeaningChange, before: Ruleset, host: Host, cluster_ips: Container[str]
) -> bool:
    """Return whether a change shows only that `before` are the rules of a version before 1.26.

    Such a version marks packets for KUBE-FIREWALL, which drops fewer of them. Before 1.24, local traffic reaches external
    IPs without masquerading.
    """
    if _PROXY_FIREWALL in before.chains or _MARK_DROP not in before.chains:
        return False
    passes = not change.origin.on_node
    address = change.destination.address
    any_source = (
        address not in cluster_ips
        and not host.is_local(address)
        and not any(key.chain.startswith(names.EXTERNAL_PREFIX) for key in before.chains)
    )
    return same_meaning(*(_reduced(it, passes, any_source) for it in (change.before, change.after)))


def _reduced(meaning: Meaning, passes: bool, any_source: bool) -> Meaning:
    """Return a meaning in which dropped packets pass, or in which masquerading does not count."""
    reduced: dict[Outcome, list[Part]] = {}
    for outcome, parts in meaning.items():
        if (passes and outcome.verdict is PacketVerdict.DROP) or outcome.verdict is PacketVerdict.PASS:
            same = Outcome(PacketVerdict.PASS)
        elif any_source:
            same = msgspec.structs.replace(outcome, masquerade=False, accepted=None)
        else:
            same = outcome
        reduced.setdefault(same, []).extend(parts)
    return {outcome: tuple(parts) for outcome, parts in reduced.items()}
