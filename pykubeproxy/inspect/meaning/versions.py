"""What older versions of kube-proxy do otherwise by design."""

from collections.abc import Container

import msgspec

from pykubeproxy.inspect.meaning.outcomes import Meaning, MeaningChange, Outcome, Part, same_meaning
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.inspect.trace.packet import Host
from pykubeproxy.rules import names
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

_PROXY_FIREWALL = ChainKey("filter", names.PROXY_FIREWALL)
_MARK_DROP = ChainKey("nat", "KUBE-MARK-DROP")


class OlderVersion(msgspec.Struct, frozen=True):
    """What rules of a version of kube-proxy do otherwise.

    - `marks_drops`: before 1.26, they mark packets to drop for the kubelet's KUBE-FIREWALL, which forwarded packets do
      not meet
    - `keeps_sources`: before 1.24, they do not masquerade local traffic to external IPs
    """

    marks_drops: bool
    keeps_sources: bool

    def explains(self, change: MeaningChange, host: Host, cluster_ips: Container[str]) -> bool:
        """Return whether nothing but the version causes a change. `host` is the node."""
        passes = self.marks_drops and not change.origin.on_node
        address = change.destination.address
        any_source = self.keeps_sources and address not in cluster_ips and not host.is_local(address)
        if not passes and not any_source:
            return False
        return same_meaning(*(_reduced(it, passes, any_source) for it in (change.before, change.after)))


def older_version(rules: Ruleset) -> OlderVersion:
    """Return what rules do otherwise. The kubelet before 1.28 writes KUBE-MARK-DROP for newer versions, too."""
    if _PROXY_FIREWALL in rules.chains or _MARK_DROP not in rules.chains:
        return OlderVersion(marks_drops=False, keeps_sources=False)
    jump = f"-j {_MARK_DROP.chain}"
    return OlderVersion(
        marks_drops=any(it.endswith(jump) for some in rules.chains.values() for it in some),
        keeps_sources=not any(key.chain.startswith(names.EXTERNAL_PREFIX) for key in rules.chains),
    )


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
