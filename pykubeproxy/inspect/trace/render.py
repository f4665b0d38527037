"""The text and the JSON document of `pykubeproxy trace`."""

from collections.abc import Iterable, Iterator
from itertools import groupby

import msgspec

from pykubeproxy import API_VERSION
from pykubeproxy.inspect.render_json import rounded
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.inspect.targets import Names
from pykubeproxy.inspect.trace.model import Rejection, Trace
from pykubeproxy.inspect.trace.packet import Packet
from pykubeproxy.inspect.trace.walk import Step
from pykubeproxy.objects import address_and_port
from pykubeproxy.rules.parse import parse_rule, without_comment
from pykubeproxy.wording import TIE, SafeText, percent, styled, text_of, wrapped

_NO_NAMES = Names()
# How many endpoints are listed, and to how many of them the path is shown.
_ENDPOINTS, _PATHS = 20, 4
_REJECTED = {PacketVerdict.DROP: "dropped", PacketVerdict.REJECT: "rejected"}


def text(trace: Trace, names: Names = _NO_NAMES) -> SafeText:
    """Return the trace in 80 columns, longer names apart."""
    lines = [_title(trace.packet), *names.resolved, *_result(trace, names), "", *path_lines(trace)]
    return text_of(lines)


def _title(packet: Packet) -> str:
    destination = address_and_port(packet.destination, packet.port)
    where = (
        "from this node" if packet.starts_here else f"by {packet.received_by}" if packet.received_by else ""
    )
    title = f"{packet.source} to {destination}, {packet.protocol.upper()}"
    return styled(title, bold=True) + (f", {where}" if where else "")


def _result(trace: Trace, names: Names) -> Iterator[str]:
    source = ", masqueraded: its source is replaced" if trace.masquerade else " and keeps its source"
    match trace.verdict:
        case PacketVerdict.DNAT:
            number = len(trace.endpoints)
            to = "one endpoint" if number == 1 else f"one of {number} endpoints"
            yield f"goes to {to}{source}"
            yield from _endpoints(trace, names)
        case PacketVerdict.PASS:
            yield f"matches no service; goes to its destination{source}"
        case _ if len(trace.rejections) > 1:
            yield f"is {_REJECTED[trace.verdict]}"
    yield from (line for rejection in trace.rejections for line in _rejection(rejection))


def _endpoints(trace: Trace, names: Names) -> Iterator[str]:
    shown = trace.endpoints[:_ENDPOINTS]
    longest = max(len(address_and_port(endpoint.address, endpoint.port)) for endpoint in shown)
    for endpoint in shown:
        at = address_and_port(endpoint.address, endpoint.port)
        remark = "masqueraded" if endpoint.masquerade and not trace.masquerade else ""
        name = names.pods.get(endpoint.address, "")
        yield "  ".join(
            (_share(endpoint.probability), f"{at:<{longest}}", *filter(None, (name, remark)))
        ).rstrip()
    if others := trace.endpoints[_ENDPOINTS:]:
        share = sum(endpoint.probability for endpoint in others)
        yield f"{_share(share)}  {len(others)} more (-o json lists all)"


def _rejection(rejection: Rejection) -> Iterator[str]:
    step = rejection.step
    certain = rejection.probability > 1 - 1e-9
    share = "" if certain else f"{_share(rejection.probability)}  "
    comment = parse_rule(step.rule).comment
    by = f"{_REJECTED[rejection.verdict]} in {step.table} {step.chain}{f': {comment}' if comment else ''}"
    lines = wrapped(f"is {by}" if certain else by, share, " " * len(share))
    return (styled(line, "yellow") for line in lines)


def _share(probability: float) -> str:
    return f"{percent(probability):>7}"


def path_lines(trace: Trace) -> Iterator[str]:
    """Yield the steps by chain; with many endpoints only some of the paths to them."""
    dnat = [number for number, step in enumerate(trace.steps, 1) if "-j DNAT " in step.rule and step.matched]
    if len(dnat) <= _PATHS:
        yield from _chains(trace.steps)
        return
    yield from _chains(trace.steps[: dnat[_PATHS - 1]])
    yield f"and {len(dnat) - _PATHS} more endpoints (-o json lists all)"
    yield from _chains(trace.steps[dnat[-1] :])


def _chains(steps: Iterable[Step]) -> Iterator[str]:
    for (table, chain), group in groupby(steps, lambda step: (step.table, step.chain)):
        yield styled(f"{table} {chain}", "cyan")
        for _, alike in groupby(group, lambda step: step if step.matched else step.reason):
            first, *others = alike
            yield from _step(first)
            if others:
                yield styled(f"  no  {len(others)} more for the same reason", dim=True)


def _step(step: Step) -> Iterator[str]:
    start = " yes  " if step.matched else "  no  "
    bare = without_comment(step.rule) or "(only counts packets)"
    rule = wrapped(bare.replace(" -j ", f" -j{TIE}").replace(" -g ", f" -g{TIE}"), start, " " * 10)
    yield from rule if step.matched else (styled(line, dim=True) for line in rule)
    # Some comments continue with a remark for authors of rules.
    comment = parse_rule(step.rule).comment.partition(";")[0]
    reason = f"{step.reason} ({comment})" if comment else step.reason
    yield from (styled(line, dim=True) for line in wrapped(reason, " " * 8))


def document(trace: Trace, names: Names = _NO_NAMES) -> dict[str, object]:
    """The trace as a JSON document of version pykubeproxy/v1.

    {"apiVersion": "pykubeproxy/v1",
     "packet": {"protocol": "TCP"|"UDP"|"SCTP", "source", "destination", "port",
                "from": "node" if it starts on this node, else "network",
                "interface": the incoming interface, or ""},
     "names": {"source": such as "pod/default/client", "" if unknown, "destination": such as "svc/default/web:http",
               "endpoints": {address: such as "pod/default/web-1"}},
     "verdict": "dnat"|"reject"|"drop"|"pass", "masquerade": true if its source is replaced for every endpoint,
     "endpoints": [{"address", "port", "probability": 0 to 1, "masquerade": true if its source is replaced for this
                    endpoint}],
     "rejections": [{"verdict": "reject"|"drop", "probability", "table", "chain", "rule"}],
     "steps": [{"table", "chain", "rule", "matched": true or false, "reason": a phrase}]}

    With verdict "dnat", the probabilities of endpoints and rejections add up to 1. A rule is the text that iptables-save
    prints after "-A CHAIN ", or "policy DROP". Steps are in the order of the path, with alternatives one after the
    other, and omit rules for other destinations, ports and protocols. Keys may be added.
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
        "names": {"source": names.source, "destination": names.destination, "endpoints": names.pods},
        "verdict": trace.verdict.value,
        "masquerade": trace.masquerade,
        "endpoints": [
            {**msgspec.to_builtins(endpoint), "probability": rounded(endpoint.probability)}
            for endpoint in trace.endpoints
        ],
        "rejections": [
            {
                "verdict": rejection.verdict.value,
                "probability": rounded(rejection.probability),
                **{key: getattr(rejection.step, key) for key in ("table", "chain", "rule")},
            }
            for rejection in trace.rejections
        ],
        "steps": msgspec.to_builtins(trace.steps),
    }
