"""Name the settings that rules show, and the nodes whose settings are not those of most nodes."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pykubeproxy.objects import Family, Node
from pykubeproxy.rules.inferred import InferredSettings


class OtherSetting(NamedTuple):
    """A setting that some nodes have with another value than most nodes."""

    name: str
    value: str
    usual: str
    nodes: tuple[str, ...]


def described(settings: InferredSettings, node: Node, family: Family) -> Mapping[str, str]:
    """Return the settings of one family by name; nodes with the same configuration get the same text."""
    if not settings.serves:
        return {}
    suffix = "" if family is Family.IPV4 else f" ({family.value})"
    found = {
        "masqueradeAll": str(settings.masquerade_all).lower(),
        "masqueradeBit": str(settings.masquerade_bit),
        "nodePortAddresses": _node_ports(settings.node_port_jumps),
        "localhostNodePorts": str(settings.localhost_node_ports).lower(),
    }
    if settings.local_traffic or not settings.masquerade_all:
        found["detectLocal"] = _local_traffic(settings, node)
    return {f"{name}{suffix}": value for name, value in found.items()}


def other_settings(nodes: Mapping[str, Mapping[str, str]]) -> tuple[OtherSetting, ...]:
    """Return the settings with values that fewer nodes have than another value."""
    values: dict[str, dict[str, list[str]]] = {}
    for node, settings in nodes.items():
        for name, value in settings.items():
            values.setdefault(name, {}).setdefault(value, []).append(node)
    return tuple(_others(values))


def _others(values: Mapping[str, Mapping[str, list[str]]]) -> Iterable[OtherSetting]:
    for name, by_value in values.items():
        usual = Counter({value: len(nodes) for value, nodes in by_value.items()}).most_common(1)[0][0]
        for value, nodes in by_value.items():
            if value != usual:
                yield OtherSetting(name, value, usual, tuple(nodes))


def _local_traffic(settings: InferredSettings, node: Node) -> str:
    local = settings.local_traffic
    if local is None:
        return "none"
    if local.interface:
        return f"interface {local.interface}"
    return "podCIDR of the Node" if local.source in node.pod_cidrs else local.source


def _node_ports(jumps: tuple[str, ...]) -> str:
    if not jumps:
        return "no address"
    return "all" if any("--dst-type LOCAL" in it for it in jumps) else "some addresses"
