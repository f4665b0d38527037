"""The text of iptables-restore --noflush: chains, lines and blocks."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pykubeproxy.rules.ruleset import ChainKey

Rules = tuple[str, ...]


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
