"""The text and the JSON document of `kubectl pykubeproxy explain`."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from pykubeproxy import API_VERSION
from pykubeproxy.inspect.explain.agreement import Agreement
from pykubeproxy.inspect.explain.model import EndpointExplanation
from pykubeproxy.inspect.explain.nodes import NodeGroup, PortOnNodes, ServiceOnNodes
from pykubeproxy.inspect.explain.render_json import endpoint_entry, reason_entry
from pykubeproxy.inspect.explain.render_text import (
    endpoint_reason,
    ignored_hints_message,
    rejection,
    restrictions,
    service_notes,
    skip_message,
)
from pykubeproxy.inspect.render_json import port_entry
from pykubeproxy.inspect.routes import Policy
from pykubeproxy.services.frontend import Frontend, frontends
from pykubeproxy.services.ports import ServicePort
from pykubeproxy.services.selection import Reason
from pykubeproxy.wording import SafeText, counted, listed, percent, styled, text_of, tied, wrapped

_INDENT = "  "
# How many nodes a title names, and how many groups of nodes and endpoints are listed.
_NODES, _GROUPS, _ENDPOINTS = 4, 12, 20


def text(services: Iterable[ServiceOnNodes], nodes: int, compared: Agreement | None = None) -> SafeText:
    """Return the endpoints that a Service uses on each of several nodes in 80 columns."""
    parts = [_service(one, nodes) for one in services]
    return text_of(*parts, *([_compared(compared)] if compared else ()))


def _compared(compared: Agreement) -> Iterator[str]:
    if compared.unread:
        yield from wrapped(f"The rules of {compared.node} are unknown: {compared.unread}", "", _INDENT)
    elif not compared.differences:
        yield styled(f"The rules of {compared.node} agree.", "green")
    else:
        yield styled(f"The rules of {compared.node} differ:", "red")
        for difference in compared.differences:
            yield from wrapped(difference, _INDENT, _INDENT * 2)
        yield f"Next: kubectl pykubeproxy diff --node {compared.node}"


def _service(service: ServiceOnNodes, nodes: int) -> Iterator[str]:
    remarks = [line for note in service_notes(service.first) for line in wrapped(note, _INDENT)]
    if remarks or not service.ports:
        yield styled(str(service.first.service.key), bold=True)
        yield from remarks
    for number, port in enumerate(service.ports):
        if number or remarks:
            yield ""
        yield from _port(port, nodes)


def _port(port: PortOnNodes, nodes: int) -> Iterator[str]:
    first = port.first
    yield f"{styled(str(first.name), bold=True)}  {first.name.protocol} {first.family.value}"
    for sentence in (*_destinations(first.port), *restrictions(first)):
        yield from wrapped(sentence, _INDENT, _INDENT * 2)
    for policy, groups in port.policies.items():
        yield f"{_INDENT}Policy {policy.value}"
        serving = [group for group in groups if group.serves]
        for group in serving[:_GROUPS]:
            yield from _group(group, nodes)
        if more := serving[_GROUPS:]:
            count = counted(sum(len(group.nodes) for group in more), "more node")
            yield f"{_INDENT * 2}and {count} with other endpoints (--node shows one, -o json all)"
        for group in groups[len(serving) :]:
            yield from _group(group, nodes)
    if first.skipped:
        yield f"{_INDENT}Skipped"
    for skipped in first.skipped:
        yield from wrapped(skip_message(skipped), _INDENT * 2, _INDENT * 3)


def _destinations(port: ServicePort) -> Iterator[str]:
    """Yield where the frontends lead."""
    internal, *external = frontends(port)
    to = {
        False: "to endpoints on any node ({} Cluster)",
        True: "only to endpoints on the node that receives the packet ({} Local)",
    }
    yield f"{_listed([internal])} {to[port.internal_local].format('internalTrafficPolicy')}."
    if external:
        inside = "; for packets of that node and its pods, on any node" * port.external_local
        yield f"{_listed(external)} {to[port.external_local].format('externalTrafficPolicy')}{inside}."


def _listed(some: Sequence[Frontend]) -> str:
    names = listed(tied(str(frontend)) for frontend in some)
    return f"{names[:1].upper()}{names[1:]} {'leads' if len(some) == 1 else 'lead'}"


def _group(group: NodeGroup, nodes: int) -> Iterator[str]:
    yield from wrapped(f"On {_names(group.nodes, nodes)}:", _INDENT * 2, _INDENT * 3)
    if reason := rejection(group.policy, group.port.slices):
        for line in wrapped(reason, _INDENT * 3, _INDENT * 4):
            yield styled(line, "yellow")
    if group.policy.policy is Policy.CLUSTER:
        for ignored in group.port.ignored_hints:
            yield from wrapped(ignored_hints_message(ignored), _INDENT * 3, _INDENT * 4)
    endpoints = group.policy.endpoints
    for used in (True, False):
        some = [it for it in endpoints if it.reason.used is used and it.reason is not Reason.NOT_LOCAL]
        for one in some[:_ENDPOINTS]:
            yield from _endpoint(one)
        if len(some) > _ENDPOINTS:
            share = percent(sum(it.share for it in some[_ENDPOINTS:])) if used else "-"
            yield f"{_INDENT * 2}{share:>8}  {len(some) - _ENDPOINTS} more (-o json lists all)"
    elsewhere = sum(it.reason is Reason.NOT_LOCAL for it in endpoints)
    if elsewhere and group.serves:
        yield f"{_INDENT * 3}{counted(elsewhere, 'endpoint')} on other nodes"


def _names(names: Sequence[str], nodes: int) -> str:
    """Such as "node1 and node2", "every node" or "node1, node2 and 198 more nodes"."""
    if len(names) == nodes > 1:
        return f"every node ({nodes})"
    return f"{listed(names, _NODES)}{' nodes' if len(names) > _NODES else ''}"


def _endpoint(one: EndpointExplanation) -> list[str]:
    endpoint = one.resolved.endpoint
    share = percent(one.share) if one.reason.used else "-"
    where = f" on {endpoint.node_name}" if endpoint.node_name else ""
    pod = f" ({endpoint.pod})" if endpoint.pod else ""
    start = f"{_INDENT * 2}{share:>8}  {one.resolved.target}"
    return wrapped(f"{where}{pod}: {endpoint_reason(one.reason, endpoint)}".lstrip(), f"{start} ", " " * 14)


def document(services: Iterable[ServiceOnNodes], compared: Agreement | None = None) -> dict[str, object]:
    """The answers of several nodes as a JSON document of version pykubeproxy/v1.

    {"apiVersion", "services": [{"namespace", "name", "port", "protocol", "family",
      "policies": [{"policy": "Cluster" or "Local", "frontends": [{"kind", "address", "port"}],
        "fromThisNode": frontends that lead here only for packets of the same node and its pods,
        "groups": [{"nodes": [name], "verdict": "dnat", "reject" or "drop",
          "endpoints": [{"address", "port", "node", "zone", "pod", "share": 0 to 1, "used": bool,
            "reason": such as "not-ready", "message": the same as a phrase}]}]}]}],
     "skippedServices": [{"namespace", "name", "family", "reason", "message"}],
     "rules": with --node, {"node", "agree": true or false, or null if they are unknown, "differences": [sentence],
      "unread": why they are unknown, or null}; else null}

    "services" has one entry for each service port and family, and "groups" one for all nodes that use the same endpoints.
    Verdicts, endpoints and reasons are those of `pykubeproxy explain`. Keys may be added.
    """
    found = list(services)
    return {
        "apiVersion": API_VERSION,
        "services": [_port_entry(port) for service in found for port in service.ports],
        "skippedServices": [
            {
                "namespace": service.first.service.namespace,
                "name": service.first.service.name,
                "family": family.value,
                **reason_entry(reason, reason.value),
            }
            for service in found
            for family, reason in service.first.skipped.items()
        ],
        "rules": compared
        and {
            "node": compared.node,
            "agree": None if compared.unread else not compared.differences,
            "differences": list(compared.differences),
            "unread": compared.unread or None,
        },
    }


def _port_entry(port: PortOnNodes) -> dict[str, object]:
    return {
        **port_entry(port.first.name),
        "family": port.first.family.value,
        "policies": [
            {
                "policy": policy.value,
                "frontends": msgspec.to_builtins(groups[0].policy.frontends),
                "fromThisNode": msgspec.to_builtins(groups[0].policy.from_this_node),
                "groups": [_group_entry(group) for group in groups],
            }
            for policy, groups in port.policies.items()
        ],
    }


def _group_entry(group: NodeGroup) -> dict[str, object]:
    return {
        "nodes": list(group.nodes),
        "verdict": group.policy.verdict.value,
        "endpoints": [endpoint_entry(one) for one in group.policy.endpoints],
    }
