"""Explanations as text: for people in 80 columns, and as a document for programs."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import click

from pykubeproxy import API_VERSION
from pykubeproxy.inspect.explain import Difference, Explanation, PolicyWhy, PortWhy, differences
from pykubeproxy.inspect.forms import TIE, WIDTH, frontend_entry
from pykubeproxy.inspect.sentences import (
    notes,
    outcome,
    place_in_words,
    service_notes,
    ways,
    why,
    why_passed_over,
    why_unheeded,
)
from pykubeproxy.objects import Endpoint
from pykubeproxy.services.selection import IgnoredHints, NodeTopology, Reason, Topology

_INDENT = "  "
# How wide a target may be for its reason to stand beside it.
_BESIDE = 21


def text(explanations: Iterable[Explanation], place: NodeTopology) -> str:
    """Explanations for people, as the Services are served at a place; styled, which click.echo undoes for files."""
    parts = [f"On {click.style(place_in_words(place), bold=True)}:\n"]
    for explanation in explanations:
        about = [line for note in service_notes(explanation) for line in _wrapped(note, _INDENT)]
        if about or not explanation.ports:
            parts.append("".join(f"{line}\n" for line in (_title(str(explanation.service.key)), *about)))
        parts += ["".join(f"{line}\n" for line in _port(port)) for port in explanation.ports]
    return "\n".join(parts)


def comparison(there: Sequence[Explanation], here: Sequence[Explanation], place: NodeTopology) -> str:
    """How `here`, which is at `place`, differs from what has been explained for another place, `there`."""
    found = differences(_ports(here), _ports(there))
    where = click.style(place_in_words(place), bold=True)
    if not found:
        return f"\nOn {where} the same endpoints are used.\n"
    lines = [f"\nOn {where} it is otherwise:"]
    for (name, family, policy), those in groupby(found, lambda it: (it.name, it.family, it.policy)):
        lines.append(f"{_INDENT}{name}  {name.protocol} {family.value}, policy {policy.value}")
        for it in those:
            used = "used" if it.here.used else "not used"
            reason = why(it.here, it.backend.endpoint)
            lines += _wrapped(f"{it.backend.target} is {used}: {reason}", _INDENT * 2)
    return "".join(f"{line}\n" for line in lines)


def document(
    explanations: Iterable[Explanation],
    place: NodeTopology,
    unlike: tuple[Sequence[Explanation], NodeTopology] | None = None,
) -> dict[str, object]:
    """Explanations as a document for JSON, of version pykubeproxy/v1.

    {"apiVersion", "place": {"node", "zone"},
     "services": [{"namespace", "name", "port", "protocol", "family",
      "policies": [{"policy", "verdict": "dnat", "reject" or "drop", "chain": the balancing chain or null,
        "frontends": [{"kind", "address", "port"}],
        "fromThisNode": frontends which lead here for packets of this node and its pods only,
        "endpoints": [{"address", "port", "node", "zone", "pod", "used": bool, "share": 0 to 1,
          "reason": such as "not-ready", "why": a sentence}]}],
      "topology": "all", "same node", "same zone", or null where hints play no part,
      "hintsIgnored": [{"hints": "node" or "zone", "here", "lacking": ["address:port"], "why"}],
      "passedOver": [{"slice", "address": or null for all of it, "reason", "why"}],
      "affinitySeconds": or null, "sourceRanges": [CIDR], "healthCheckNodePort": or null,
      "setAside": whether it is not served for iptables refusing its rules,
      "notes": [sentence]}],
     "leftOut": [{"namespace", "name", "family", "reason", "why"}],
     "refused": [{"namespace", "name", "field", "address", "why"}],
     "differences": null or {"place", "endpoints": [{"namespace", "name", "portName", "protocol", "family",
      "policy", "address", "port", "used", "reason", "why"}]}}

    There is an entry in "services" for each service port and family. "refused" are addresses of the Services that are
    never served. "differences" is there if it was explained for another place than the node itself, which it then names:
    its endpoints are those that are used at one of the two and not at the other, with what holds on the node. Keys may be
    added.
    """
    explanations = tuple(explanations)
    return {
        "apiVersion": API_VERSION,
        "place": _place(place),
        "services": [_entry(port) for it in explanations for port in it.ports],
        "leftOut": [
            {
                "namespace": it.service.namespace,
                "name": it.service.name,
                "family": family.value,
                "reason": _slug(reason.name),
                "why": reason.value,
            }
            for it in explanations
            for family, reason in it.left_out.items()
        ],
        "refused": [
            {
                "namespace": it.service.namespace,
                "name": it.service.name,
                "field": refused.field,
                "address": refused.address,
                "why": refused.reason,
            }
            for it in explanations
            for refused in it.service.refused
        ],
        "differences": unlike
        and {
            "place": _place(unlike[1]),
            "endpoints": [_difference(it) for it in differences(_ports(unlike[0]), _ports(explanations))],
        },
    }


def _ports(explanations: Iterable[Explanation]) -> Iterator[PortWhy]:
    return (port for it in explanations for port in it.ports)


def _port(port: PortWhy) -> Iterator[str]:
    yield f"{_title(str(port.name))}  {port.name.protocol} {port.family.value}"
    for sentence in ways(port):
        yield from _wrapped(sentence, _INDENT)
    width = max((len(it.backend.target) for policy in port.policies for it in policy.endpoints), default=0)
    for policy in port.policies:
        yield from _policy(policy, port.slices, width)
    if port.passed:
        yield f"{_INDENT}Passed over"
    for passed in port.passed:
        yield from _wrapped(why_passed_over(passed), _INDENT * 2)
    for sentence in notes(port):
        yield from _wrapped(sentence, _INDENT)


def _policy(policy: PolicyWhy, slices: int, width: int) -> Iterator[str]:
    chain = f", chain {policy.chain}" if policy.chain else ""
    yield f"{_INDENT}Policy {policy.policy.value}{chain}"
    if refusal := outcome(policy, slices):
        for line in _wrapped(refusal, _INDENT * 2):
            yield click.style(line, fg="yellow")
    for it in policy.endpoints:
        share = f"{100 * it.share:.3g}%" if it.reason.used else "-"
        start = f"{share:>8}  {it.backend.target:<{width}}  "
        reason = why(it.reason, it.backend.endpoint)
        if width <= _BESIDE or len(start) + len(reason) <= WIDTH:
            yield from _wrapped(reason, " " * len(start), start)
        else:
            yield start.rstrip()
            yield from _wrapped(reason, " " * 10)


def _title(name: str) -> str:
    return click.style(name, bold=True)


def _wrapped(text: str, indent: str, start: str | None = None) -> list[str]:
    """A text in lines of at most 80 columns, the first of which may begin otherwise than with the indent."""
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent if start is None else start,
        subsequent_indent=indent if start is not None else indent + _INDENT,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [line.replace(TIE, " ") for line in lines]


def _place(place: NodeTopology) -> dict[str, object]:
    return {"node": place.node_name, "zone": place.zone}


def _entry(port: PortWhy) -> dict[str, object]:
    it = port.port
    return {
        "namespace": it.name.namespace,
        "name": it.name.service,
        "port": it.name.port,
        "protocol": it.name.protocol,
        "family": port.family.value,
        "policies": [_policy_entry(policy) for policy in port.policies],
        "topology": port.topology.value if port.topology else None,
        "hintsIgnored": [_unheeded(unheeded) for unheeded in port.unheeded],
        "passedOver": [
            {
                "slice": passed.slice_name,
                "address": passed.address or None,
                "reason": _slug(passed.reason.name),
                "why": passed.reason.value,
            }
            for passed in port.passed
        ],
        "affinitySeconds": it.affinity_seconds,
        "sourceRanges": list(it.source_ranges),
        "healthCheckNodePort": it.health_check_node_port or None,
        "setAside": bool(port.set_aside),
        "notes": [note.replace(TIE, " ") for note in (*ways(port), *notes(port))],
    }


def _policy_entry(policy: PolicyWhy) -> dict[str, object]:
    return {
        "policy": policy.policy.value,
        "verdict": policy.verdict.value,
        "chain": policy.chain or None,
        "frontends": [frontend_entry(frontend) for frontend in policy.frontends],
        "fromThisNode": [frontend_entry(frontend) for frontend in policy.from_this_node],
        "endpoints": [
            {
                "address": it.backend.endpoint.address,
                "port": it.backend.port,
                "node": it.backend.endpoint.node_name,
                "zone": it.backend.endpoint.zone,
                "pod": it.backend.endpoint.pod,
                "share": round(it.share, 9),
                **_reason(it.reason, it.backend.endpoint),
            }
            for it in policy.endpoints
        ],
    }


def _difference(it: Difference) -> dict[str, object]:
    return {
        "namespace": it.name.namespace,
        "name": it.name.service,
        "portName": it.name.port,
        "protocol": it.name.protocol,
        "family": it.family.value,
        "policy": it.policy.value,
        "address": it.backend.endpoint.address,
        "port": it.backend.port,
        **_reason(it.here, it.backend.endpoint),
    }


def _reason(reason: Reason, endpoint: Endpoint) -> dict[str, object]:
    return {"used": reason.used, "reason": _slug(reason.name), "why": why(reason, endpoint)}


def _unheeded(unheeded: IgnoredHints) -> dict[str, object]:
    return {
        "hints": "node" if unheeded.hints is Topology.SAME_NODE else "zone",
        "here": unheeded.here,
        "lacking": list(unheeded.lacking),
        "why": why_unheeded(unheeded),
    }


def _slug(name: str) -> str:
    return name.lower().replace("_", "-")
