"""A trace as text: an answer for people with the way there, and a document for programs."""

import textwrap
from collections.abc import Iterable, Iterator
from itertools import groupby

import click

from pykubeproxy import API_VERSION
from pykubeproxy.inspect.dump import Verdict
from pykubeproxy.inspect.forms import TIE, WIDTH
from pykubeproxy.inspect.matching import comment_of, without_comment
from pykubeproxy.inspect.packet import Packet
from pykubeproxy.inspect.trace import Chosen, Refusal, Trace
from pykubeproxy.inspect.walking import Step
from pykubeproxy.objects import address_and_port

# How many endpoints are listed, and how many of the ways to them are shown step by step.
_ENDPOINTS, _WAYS = 20, 4
_REFUSED = {Verdict.DROP: "dropped", Verdict.REJECT: "refused"}


def document(trace: Trace) -> dict[str, object]:
    """The trace as a document for JSON, of version pykubeproxy/v1.

    {"apiVersion": "pykubeproxy/v1",
     "packet": {"protocol": "TCP"|"UDP"|"SCTP", "source", "destination", "port",
                "from": "node" if it starts on this node, else "network", "interface": it comes in by, or ""},
     "verdict": "dnat"|"reject"|"drop"|"pass", "masquerade": whether its source is replaced, whichever endpoint it gets,
     "endpoints": [{"address", "port", "probability": 0 to 1, "masquerade": whether its source is replaced if it gets
                    this one}],
     "refusals": [{"verdict": "reject"|"drop", "probability", "table", "chain", "rule"}],
     "steps": [{"table", "chain", "rule", "matched": true or false, "why": a sentence}]}

    Under "dnat" the probabilities of endpoints and refusals add up to 1. A rule is the text that iptables-save prints
    after "-A CHAIN ", or "policy DROP". Steps are in the order of the way, what may happen instead of each other one
    after the other; rules for other destinations, ports and protocols are left out. More keys may be added.
    """
    packet = trace.packet
    return {
        "apiVersion": API_VERSION,
        "packet": {
            "protocol": packet.protocol.upper(),
            "source": packet.source,
            "destination": packet.destination,
            "port": packet.port,
            "from": "node" if packet.starts_here else "network",
            "interface": packet.received_by,
        },
        "verdict": trace.verdict.value,
        "masquerade": trace.masquerade,
        "endpoints": [_endpoint(endpoint) for endpoint in trace.endpoints],
        "refusals": [_refusal(refusal) for refusal in trace.refusals],
        "steps": [_step(step) for step in trace.steps],
    }


def _endpoint(endpoint: Chosen) -> dict[str, object]:
    return {
        "address": endpoint.address,
        "port": endpoint.port,
        "probability": _rounded(endpoint.probability),
        "masquerade": endpoint.masquerade,
    }


def _refusal(refusal: Refusal) -> dict[str, object]:
    step = refusal.step
    return {
        "verdict": refusal.verdict.value,
        "probability": _rounded(refusal.probability),
        "table": step.table,
        "chain": step.chain,
        "rule": step.rule,
    }


def _step(step: Step) -> dict[str, object]:
    return {
        "table": step.table,
        "chain": step.chain,
        "rule": step.rule,
        "matched": step.matched,
        "why": step.why,
    }


def _rounded(probability: float) -> float:
    """iptables keeps probabilities in 31 bits: beyond nine digits there is only noise."""
    return round(probability, 9)


def text(trace: Trace) -> str:
    """The trace for people, in 80 columns; styled, which click.echo undoes where it is not a terminal."""
    lines = [_title(trace.packet), *_answer(trace), "", *_way(trace)]
    return "".join(f"{line}\n" for line in lines)


def _title(packet: Packet) -> str:
    destination = address_and_port(packet.destination, packet.port)
    where = (
        "from this node" if packet.starts_here else f"by {packet.received_by}" if packet.received_by else ""
    )
    title = f"{packet.source} to {destination}, {packet.protocol.upper()}"
    return click.style(title, bold=True) + (f", {where}" if where else "")


def _answer(trace: Trace) -> Iterator[str]:
    """What becomes of the packet, in a few lines."""
    source = "masqueraded: its source is replaced" if trace.masquerade else "and keeps its source"
    match trace.verdict:
        case Verdict.DNAT:
            number = len(trace.endpoints)
            to = "one endpoint" if number == 1 else f"one of {number} endpoints"
            yield f"goes to {to}, {source}"
            yield from _endpoints(trace)
        case Verdict.PASS:
            yield f"meets no rule of a service; goes on to its destination, {source}"
        case _ if len(trace.refusals) > 1:
            yield f"is {_REFUSED[trace.verdict]}"
    yield from (line for refusal in trace.refusals for line in _refused(refusal))


def _endpoints(trace: Trace) -> Iterator[str]:
    shown = trace.endpoints[:_ENDPOINTS]
    longest = max(len(address_and_port(it.address, it.port)) for it in shown)
    for endpoint in shown:
        at = address_and_port(endpoint.address, endpoint.port)
        # Where it differs from what holds for the others it is worth a word.
        remark = "masqueraded" if endpoint.masquerade and not trace.masquerade else ""
        yield f"{_percent(endpoint.probability)}  {at:<{longest}}  {remark}".rstrip()
    if others := trace.endpoints[_ENDPOINTS:]:
        share = sum(endpoint.probability for endpoint in others)
        yield f"{_percent(share)}  {len(others)} more, which -o json shows"


def _refused(refusal: Refusal) -> Iterator[str]:
    step = refusal.step
    certain = refusal.probability > 1 - 1e-9
    share = "" if certain else f"{_percent(refusal.probability)}  "
    remark = comment_of(step.rule)
    by = f"{_REFUSED[refusal.verdict]} in {step.table} {step.chain}{f': {remark}' if remark else ''}"
    lines = _wrapped(f"is {by}" if certain else by, share, " " * len(share))
    return (click.style(line, fg="yellow") for line in lines)


def _percent(probability: float) -> str:
    return f"{f'{100 * probability:.3g}%':>7}"


def _way(trace: Trace) -> Iterator[str]:
    """The steps under the chains they are taken in; those to the endpoints as far as they are not too many."""
    chosen = [
        number for number, step in enumerate(trace.steps, 1) if "-j DNAT " in step.rule and step.matched
    ]
    if len(chosen) <= _WAYS:
        yield from _chains(trace.steps)
        return
    yield from _chains(trace.steps[: chosen[_WAYS - 1]])
    yield f"and so on for {len(chosen) - _WAYS} more endpoints, which -o json shows"
    yield from _chains(trace.steps[chosen[-1] :])


def _chains(steps: Iterable[Step]) -> Iterator[str]:
    for (table, chain), group in groupby(steps, lambda step: (step.table, step.chain)):
        yield click.style(f"{table} {chain}", fg="cyan")
        for _, alike in groupby(group, lambda step: step if step.matched else step.why):
            first, *others = alike
            yield from _rule(first)
            if others:
                yield click.style(f"  no  {len(others)} more for the same reason", dim=True)


def _rule(step: Step) -> Iterator[str]:
    start = " yes  " if step.matched else "  no  "
    # The target stays with its -j.
    bare = without_comment(step.rule) or "(it only counts)"
    tied = bare.replace(" -j ", f" -j{TIE}").replace(" -g ", f" -g{TIE}")
    rule = [line.replace(TIE, " ") for line in _wrapped(tied, start, " " * 10)]
    yield from rule if step.matched else (click.style(line, dim=True) for line in rule)
    yield from (click.style(line, dim=True) for line in _wrapped(_sentence(step), " " * 8, " " * 8))


def _sentence(step: Step) -> str:
    # Some comments go on with a remark for those who write rules.
    comment = comment_of(step.rule).partition(";")[0]
    return f"{step.why} ({comment})" if comment else step.why


def _wrapped(text: str, first: str, others: str) -> Iterator[str]:
    return iter(
        textwrap.wrap(
            text,
            WIDTH,
            initial_indent=first,
            subsequent_indent=others,
            break_on_hyphens=False,
            break_long_words=False,
        )
    )
