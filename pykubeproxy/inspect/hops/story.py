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


class Event(NamedTuple):
    """A rule that decides, by its chain, and what it does to the packet. `endpoint` is that of a DNAT rule, or ""."""

    table: str
    chain: str
    what: str
    endpoint: str = ""


def events(visit: Visit) -> tuple[Event, ...]:
    """Return what the rules of a node do to a packet, alternatives one after the other."""
    steps = visit.trace.steps if visit.trace else ()
    return tuple(
        dict.fromkeys(event for step in steps if step.matched for event in _events(step, visit.node))
    )


def _events(step: Step, node: str) -> Iterator[Event]:
    rule = parse_rule(step.rule)
    comment = rule.comment.partition(";")[0]
    target = rule.target
    if step.rule.startswith("policy "):
        yield Event(step.table, step.chain, f"{_FINAL.get(step.rule.split()[-1], '')} by the chain's policy")
    elif target in _FINAL:
        yield Event(step.table, step.chain, f"{_FINAL[target]}: {comment or step.rule}")
    elif target == "DNAT":
        endpoint = rule.options.get("--to-destination", "")
        yield Event(step.table, step.chain, f"to endpoint {endpoint}", endpoint)
    elif target in _MASQUERADING:
        to, colon, _ = step.reason.partition(": ")
        part = f" of packets {to}" if colon and to.startswith("to ") else ""
        yield Event(step.table, step.chain, f"masqueraded: {node} replaces the source{part}")
    elif target == names.MARK_MASQ:
        reason = comment if step.reason == EVERY_PACKET else step.reason
        yield Event(step.table, step.chain, f"marked for masquerading: {reason}")
    elif rule.title and names.is_owned(target) and not names.is_owned(step.chain):
        yield Event(step.table, step.chain, f"matches {comment}")
