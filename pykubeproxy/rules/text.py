"""One rule as text, in the very form iptables-save prints, so that wanted, written and live rules compare as strings."""

from collections.abc import Iterable

from pykubeproxy.rules.options import LocalTraffic


def rule(
    *matches: str,
    source: str = "",
    destination: str = "",
    interface: str = "",
    protocol: str = "",
    comment: str = "",
    target: str = "",
) -> str:
    """Put a rule together in iptables-save's order: addresses, interface, protocol, comment, other matches, target.

    `source`, `destination` and `interface` may begin with "! ". `matches` are texts such as "-m tcp --dport 80".
    """
    parts: Iterable[str] = (
        _option("-s", source),
        _option("-d", destination),
        _option("-i", interface),
        f"-p {protocol}" if protocol else "",
        f'-m comment --comment "{comment}"' if comment else "",
        *matches,
        f"-j {target}" if target else "",
    )
    return " ".join(part for part in parts if part)


def _option(name: str, value: str) -> str:
    """An address or interface option; a network that holds every address goes without saying."""
    if not value or value in ("0.0.0.0/0", "::/0"):
        return ""
    return f"! {name} {value[2:]}" if value.startswith("! ") else f"{name} {value}"


def host(address: str) -> str:
    """A single address as iptables-save prints it, with the length of its prefix."""
    return f"{address}/128" if ":" in address else f"{address}/32"


def from_local(local: LocalTraffic) -> dict[str, str]:
    """The options of a rule that matches packets of this node's pods."""
    return {"source": local.source, "interface": local.interface}


def not_from_local(local: LocalTraffic) -> dict[str, str]:
    """The options of a rule that matches all other packets."""
    return {option: f"! {value}" for option, value in from_local(local).items() if value}


def probability(of: int) -> str:
    """1/of as iptables-save prints it.

    kube-proxy hands ten decimals to iptables, which keeps them in 31 bits and prints eleven decimals of those.
    """
    return f"{round(round(1 / of, 10) * 2**31) / 2**31:.11f}"
