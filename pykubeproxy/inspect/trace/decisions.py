"""The rules that decide about a packet, among all that it meets on a node."""

from collections.abc import Iterator, Sequence

import msgspec

from pykubeproxy.inspect.packets.rule_set import EVERY_PACKET
from pykubeproxy.inspect.packets.walk import Step
from pykubeproxy.rules import names
from pykubeproxy.rules.iptables_save import parse_rule

_FINAL = {"DROP": "dropped", "REJECT": "rejected"}
_MASQUERADING = ("MASQUERADE", "SNAT")
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
    rule = parse_rule(step.rule)
    comment = rule.comment.partition(";")[0]
    target = rule.target
    if step.rule.startswith("policy "):
        yield f"{_FINAL.get(step.rule.split()[-1], '')} by the chain's policy", None
    elif target in _FINAL:
        yield f"{_FINAL[target]}: {comment or step.rule}", None
    elif target == "DNAT":
        endpoint = rule.options.get("--to-destination", "")
        yield f"to endpoint {endpoint}", endpoint
    elif target in _MASQUERADING:
        to, colon, _ = step.reason.partition(": ")
        part = f" of packets {to}" if colon and to.startswith("to ") else ""
        yield f"masqueraded: {node} replaces the source{part}", None
    elif target in _MARKS:
        yield f"{_MARKS[target]}: {comment if step.reason == EVERY_PACKET else step.reason}", None
    elif rule.title and names.is_owned(target) and not names.is_owned(step.chain):
        yield f"matches {comment}", None
