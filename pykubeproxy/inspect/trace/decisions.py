"""The rules that decide about a packet, among all that it meets on a node."""

from collections.abc import Iterator, Sequence

import msgspec

from pykubeproxy.inspect.packets.rule_set import EVERY_PACKET
from pykubeproxy.inspect.packets.walk import Step
from pykubeproxy.rules import names

_FINAL = {"drop": "dropped", "reject": "rejected"}
# kube-proxy before 1.26 marks what filter KUBE-FIREWALL drops.
_MARKS = {names.MARK_MASQ: "marked for masquerading", "KUBE-MARK-DROP": "marked to be dropped"}


class RuleDecision(msgspec.Struct, frozen=True):
    """A rule that decides, by its chain.

    - `what`: what it does to the packet
    - `endpoint`: the target of a DNAT rule, or null
    """

    table: str
    chain: str
    what: str
    endpoint: str | None = None


def decisions(steps: Sequence[Step], node: str) -> tuple[RuleDecision, ...]:
    """Return what the rules of a node do to a packet, alternatives one after the other."""
    return tuple(
        dict.fromkeys(
            RuleDecision(step.table, step.chain, what, endpoint)
            for step in steps
            if step.matched
            for what, endpoint in _decided(step, node)
        )
    )


def _decided(step: Step, node: str) -> Iterator[tuple[str, str | None]]:
    """Yield what a rule does, and the endpoint that it chooses."""
    comment = step.comment.partition(";")[0]
    of_nft_proxy = step.table in names.NFT_TABLES
    mark = "marked for masquerading" if of_nft_proxy and step.does == "mark" else _MARKS.get(step.to, "")
    if step.rule.startswith("policy "):
        yield f"{_FINAL[step.does]} by the chain's policy", None
    elif step.does in _FINAL:
        yield f"{_FINAL[step.does]}: {comment or step.rule}", None
    elif step.does == "dnat":
        yield f"to endpoint {step.to}", step.to
    elif step.does == "snat":
        to, colon, _ = step.reason.partition(": ")
        part = f" of packets {to}" if colon and to.startswith("to ") else ""
        yield f"masqueraded: {node} replaces the source{part}", None
    elif mark:
        yield f"{mark}: {comment if step.reason == EVERY_PACKET else step.reason}", None
    elif step.does == "accept" and " " in step.table and not of_nft_proxy:
        yield f"accepted: {comment or step.rule}", None
    elif of_nft_proxy and names.nft_title(step.to) and not names.nft_title(step.chain):
        yield f"matches {names.nft_title(step.to)}", None
    elif names.is_owned(step.to) and not names.is_owned(step.chain) and "/" in comment.partition(" ")[0]:
        yield f"matches {comment}", None
