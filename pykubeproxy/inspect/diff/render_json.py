"""The JSON document of `pykubeproxy diff`."""

from collections.abc import Iterable, Sequence

from pykubeproxy import API_VERSION
from pykubeproxy.inspect.diff.model import Changes, PolicyChange, ServiceChange
from pykubeproxy.inspect.diff.render_text import sentences, service_sentences
from pykubeproxy.inspect.dump.model import EndpointView
from pykubeproxy.inspect.render_json import chain_entry, port_entry, rounded
from pykubeproxy.rules.difference import ChainDifference
from pykubeproxy.wording import untied


def document(changes: Sequence[Changes], before: str, after: str) -> dict[str, object]:
    """The changes as a JSON document of version pykubeproxy/v1.

    {"apiVersion", "before", "after": the names of both sides, "different": bool,
     "services": [{"namespace", "name", "port", "protocol", "family", "change": "added", "removed" or "changed",
      "policies": [{"policy", "verdictBefore", "verdictAfter": "dnat", "reject", "drop", "pass" or null,
        "endpointsRemoved", "endpointsAdded": [{"address", "port", "share": 0 to 1}],
        "sharesChanged": [{"address", "port", "before", "after"}]}],
      "messages": [sentence]}],
     "chains": [{"family", "table", "chain", "change", "removed": [rule], "added": [rule]}],
     "messages": [sentence], those about services included}

    A service that changes without policies has other rules with the same effect. A chain that changes without rules
    removed or added has them in another order. Keys may be added.
    """
    return {
        "apiVersion": API_VERSION,
        "before": before,
        "after": after,
        "different": any(family.chains for family in changes),
        "services": [
            {**_service(service), "family": family.family.value}
            for family in changes
            for service in family.services
        ],
        "chains": [
            {"family": family.family.value, **_chain(chain)} for family in changes for chain in family.chains
        ],
        "messages": [untied(sentence) for family in changes for sentence in sentences(family)],
    }


def _service(change: ServiceChange) -> dict[str, object]:
    return {
        **port_entry(change.name),
        "change": _state(*change.present),
        "policies": [_policy(policy) for policy in change.policies],
        "messages": [untied(sentence) for sentence in service_sentences(change)],
    }


def _policy(change: PolicyChange) -> dict[str, object]:
    return {
        "policy": change.policy.value,
        "verdictBefore": change.before and change.before.verdict.value,
        "verdictAfter": change.after and change.after.verdict.value,
        "endpointsRemoved": _endpoints(change.removed),
        "endpointsAdded": _endpoints(change.added),
        "sharesChanged": [
            {
                "address": old.address,
                "port": old.port,
                "before": rounded(old.share),
                "after": rounded(new.share),
            }
            for old, new in change.reweighted
        ],
    }


def _endpoints(endpoints: Iterable[EndpointView]) -> list[dict[str, object]]:
    return [{"address": one.address, "port": one.port, "share": rounded(one.share)} for one in endpoints]


def _chain(chain: ChainDifference) -> dict[str, object]:
    return {
        **chain_entry(chain.key),
        "change": _state(chain.before is not None, chain.after is not None),
        "removed": list(chain.gone),
        "added": list(chain.new),
    }


def _state(before: bool, after: bool) -> str:
    return "changed" if before and after else "added" if after else "removed"
