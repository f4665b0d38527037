"""The rules that decide about a packet on one node, in order."""

from collections.abc import Iterator
from typing import NamedTuple

from pykubeproxy.inspect.hops.journey import Visit
from pykubeproxy.inspect.trace.rule import EVERY_PACKET
from pykubeproxy.inspect.trace.walk import Step
from pykubeproxy.rules import names
from pykubeproxy.rules.parse import parse_rule

_FINAL = {"DROP": "dropped", "REJECT": "rejected"}
_MASQUERADING = ("MASQUERADE", "SNAT")
# kube-proxy before 1.26 marks what filter KUBE-FIREWALL drops.
_MARKS = {names.MARK_MASQ: "marked for masquerading", "KUBE-MARK-DROP": "marked to be dropped"}


class Decision(NamedTuple):
    """A rule that decides, by its chain, and what it does to the packet. `endpoint` is that of a DNAT rule, or ""."""

    table: str
    chain: str
    what: str
    endpoint: str = ""


def decisions(visit: Visit) -> tuple[Decision, ...]:
    """Return what the rules of a node do to a packet, alternatives one after the other."""
    steps = visit.trace.steps if visit.trace else ()
    return tuple(
        dict.fromkeys(decision for step in steps if step.matched for decision in _decisions(step, visit.node))
    )


def _decisions(step: Step, node: str) -> Iterator[Decision]:
    rule = parse_rule(step.rule)
    comment = rule.comment.partition(";")[0]
    target = rule.target
    if step.rule.startswith("policy "):
        yield Decision(
            step.table, step.chain, f"{_FINAL.get(step.rule.split()[-1], '')} by the chain's policy"
        )
    elif target in _FINAL:
        yield Decision(step.table, step.chain, f"{_FINAL[target]}: {comment or step.rule}")
    elif target == "DNAT":
        endpoint = rule.options.get("--to-destination", "")
        yield Decision(step.table, step.chain, f"to endpoint {endpoint}", endpoint)
    elif target in _MASQUERADING:
        to, colon, _ = step.reason.partition(": ")
        part = f" of packets {to}" if colon and to.startswith("to ") else ""
        yield Decision(step.table, step.chain, f"masqueraded: {node} replaces the source{part}")
    elif target in _MARKS:
        reason = comment if step.reason == EVERY_PACKET else step.reason
        yield Decision(step.table, step.chain, f"{_MARKS[target]}: {reason}")
    elif rule.title and names.is_owned(target) and not names.is_owned(step.chain):
        yield Decision(step.table, step.chain, f"matches {comment}")
