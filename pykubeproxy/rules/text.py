"""Write rules exactly as iptables-save prints them, so that desired, written and live rules compare as strings.

Also write the input of iptables-restore --noflush: chains, lines and blocks.
"""

import functools
import ipaddress
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pykubeproxy.rules.options import LocalTraffic
from pykubeproxy.rules.ruleset import ChainKey, Rules

_EVERYTHING = ("0.0.0.0/0", "::/0")


def rule(
    *matches: str,
    source: str = "",
    destination: str = "",
    interface: str = "",
    protocol: str = "",
    comment: str = "",
    target: str = "",
) -> str:
    """Return a rule in the order of iptables-save: addresses, interface, protocol, comment, other matches, target.

    `source`, `destination` and `interface` may start with "! ". `matches` are texts such as "-m tcp --dport 80".
    """
    parts = (
        _option("-s", source),
        _option("-d", destination),
        _option("-i", interface),
        f"-p {protocol}" if protocol else "",
        f'-m comment --comment "{comment}"' if comment else "",
        *matches,
        f"-j {target}" if target else "",
    )
    return " ".join([part for part in parts if part])


def _option(name: str, value: str) -> str:
    """Return an address or interface option; "" for a network that contains every address."""
    if not value or value in _EVERYTHING:
        return ""
    if value.startswith("! "):
        return f"! {name} {printed(value[2:])}"
    return f"{name} {printed(value)}"


def host(address: str) -> str:
    """Return a single address as iptables-save prints it, with prefix length."""
    return f"{printed(address)}/128" if ":" in address else f"{address}/32"


def printed(address: str) -> str:
    """Return an address or network as iptables prints it: with embedded IPv4 addresses as ::1.2.3.4 (RFC 4291)."""
    if not address.startswith("::"):
        return address
    text, slash, length = address.partition("/")
    high, low = divmod(int(ipaddress.IPv6Address(text)), 2**32)
    if high == 0xFFFF or (high == 0 and low >= 2**16):
        text = f"::ffff:{ipaddress.IPv4Address(low)}" if high else f"::{ipaddress.IPv4Address(low)}"
    return f"{text}{slash}{length}"


def from_local(local: LocalTraffic) -> dict[str, str]:
    """Return the `rule` arguments that match packets of pods on this node."""
    return {"source": local.source, "interface": local.interface}


def not_from_local(local: LocalTraffic) -> dict[str, str] | None:
    """Return the `rule` arguments that match all other packets; None if there are none.

    iptables-nft rejects "! -s 0.0.0.0/0".
    """
    if local.source in _EVERYTHING:
        return None
    return {option: f"! {value}" for option, value in from_local(local).items() if value}


@functools.lru_cache(maxsize=1024)
def probability(part: int, whole: int) -> str:
    """Return part/whole as iptables-save prints it.

    kube-proxy passes ten decimals to iptables, which stores 31 bits and prints eleven decimals.
    """
    return f"{round(round(part / whole, 10) * 2**31) / 2**31:.11f}"


class Chain(NamedTuple):
    """A chain to create, or to replace as a whole."""

    key: ChainKey
    rules: Rules


def block(table: str, *parts: str) -> str:
    """Return one block, which iptables-restore applies as a whole; "" if all parts are empty."""
    text = "".join(parts)
    return f"*{table}\n{text}COMMIT\n" if text else ""


def write_chains(chains: Sequence[Chain]) -> str:
    """Return the lines that write these chains. All are declared before any rule may jump to them.

    They come last by name first: iptables-legacy-restore keeps chains in a sorted list and inserts each from its head.
    """
    ordered = sorted([(chain.key.chain, chain.rules) for chain in chains], reverse=True)
    lines = [f"-A {name} {rule}\n" for name, rules in ordered for rule in rules]
    return empty_chains(name for name, _ in ordered) + "".join(lines)


def empty_chains(names: Iterable[str]) -> str:
    """Return the lines that create these chains, or empty them."""
    return join(f":{name} - [0:0]" for name in names)


def delete_chains(names: Iterable[str]) -> str:
    """Return the lines that delete these chains, which must be empty and unreferenced."""
    return join(f"-X {name}" for name in names)


def join(lines: Iterable[str]) -> str:
    """Return the lines as text, each with its line break."""
    return "".join(f"{line}\n" for line in lines)
