"""The report of `cleanup`: what it removed from the tables, and what other modes left."""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from pykubeproxy.objects import Family
from pykubeproxy.report.document import Report
from pykubeproxy.report.text import Block, Heading, Section, Sentence, Verbatim
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.removal import is_of_ipvs_mode
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.wording import counted, listed

# Names of objects that a line shows, unless the text is wide.
_NAMES = 4


class CleanedChain(msgspec.Struct, frozen=True, rename="camel"):
    """A chain of the proxy that was removed or emptied."""

    table: str
    chain: str


class RemovedJump(msgspec.Struct, frozen=True, rename="camel"):
    """A jump from a built-in chain to a chain of the proxy.

    - `rule`: as iptables-save prints it after "-A CHAIN "
    """

    table: str
    chain: str
    rule: str


class CleanedTables(msgspec.Struct, frozen=True, rename="camel"):
    """The removal from the tables of one backend and family.

    - `backend`: "nft" or "legacy"
    - `jumps`: removed from built-in chains
    - `chains`: removed
    - `kept`: chains that are only emptied, because foreign rules jump to them
    - `guard_stays`: KUBE-FIREWALL stays, because nothing else protects loopback addresses
    - `input`: for iptables-restore, "" if there is nothing to remove
    - `error`: why the removal failed; null if it succeeded
    """

    backend: str
    family: Family
    jumps: Sequence[RemovedJump] = ()
    chains: Sequence[CleanedChain] = ()
    kept: Sequence[CleanedChain] = ()
    guard_stays: bool = False
    input: str = ""
    error: str | None = None

    @property
    def title(self) -> str:
        """Such as "nft, IPv4"."""
        return f"{self.backend}, {self.family.value}"


class CleanedObjects(msgspec.Struct, frozen=True, rename="camel"):
    """The removal of what another mode of kube-proxy left, of one kind.

    - `mode`: the mode that left them
    - `kind`: what they are
    - `names`: those removed
    - `addresses`: removed with the interface
    - `kept`: those that other programs created
    - `error`: why the removal failed; null if it succeeded
    """

    mode: Literal["ipvs", "nftables"]
    kind: Literal["virtual server", "interface", "ipset", "table"]
    names: Sequence[str] = ()
    addresses: Sequence[str] = ()
    kept: Sequence[str] = ()
    error: str | None = None


class CleanupReport(Report, frozen=True, kw_only=True):
    """What `cleanup` removed.

    - `dry_run`: nothing is removed; the report says what would be
    - `tables`: an entry for each backend and family whose commands are installed
    - `other_modes`: an entry for each kind of object with --all-modes, else none
    """

    dry_run: bool
    tables: Sequence[CleanedTables]
    other_modes: Sequence[CleanedObjects]

    @property
    def succeeded(self) -> bool:
        """Whether everything could be removed."""
        return not any(part.error for parts in (self.tables, self.other_modes) for part in parts)

    def blocks(self, *, wide: bool) -> Iterator[Block]:
        """Return lines by mode; `wide` adds the input for iptables-restore, and all names."""
        if wide:
            yield from (Verbatim(line) for tables in self.tables for line in tables.input.splitlines())
        done = "would be removed" if self.dry_run else "removed"
        modes: dict[str, list[Sentence]] = {"iptables": [], "ipvs": [], "nftables": []}
        for tables in self.tables:
            modes["iptables"] += map(Sentence, _rules(tables, done, of_ipvs_mode=False))
            modes["ipvs"] += map(Sentence, _rules(tables, done, of_ipvs_mode=True))
        for objects in self.other_modes:
            modes[objects.mode] += map(Sentence, _objects(objects, done, None if wide else _NAMES))
        for mode, lines in modes.items():
            if lines and self.other_modes:
                yield Section(Heading(f"{mode} mode:", ""), lines)
            else:
                yield from lines
        nothing = not any(tables.input for tables in self.tables) and not any(
            objects.names for objects in self.other_modes
        )
        if nothing and self.succeeded:
            yield Sentence("Nothing to remove.")

    def names(self) -> Iterator[str]:
        """Return the chains and the objects of other modes, each once."""
        chains = (f"chain/{key.table}/{key.chain}" for tables in self.tables for key in tables.chains)
        objects = (
            f"{found.kind.replace(' ', '-')}/{name}" for found in self.other_modes for name in found.names
        )
        return iter(dict.fromkeys((*chains, *objects)))

    def problems(self) -> Iterator[str]:
        """Return lines on what failed, and on chains that could only be emptied."""
        for objects in self.other_modes:
            if objects.error:
                yield f"Error: {objects.mode} mode: {objects.error}"
        emptied = "would only be" if self.dry_run else "was only"
        for tables in self.tables:
            if tables.error:
                yield f"Error: {tables.title}: {tables.error}"
            for key in tables.kept:
                yield (
                    f"Warning: {tables.title}: foreign rules jump to chain {key.chain} of table {key.table},"
                    f" so it {emptied} emptied; remove those rules first"
                )


def _rules(cleaned: CleanedTables, done: str, of_ipvs_mode: bool) -> Iterator[str]:
    """Yield what happened to the rules that only ipvs mode writes, or to all others."""
    jumps = sum(is_of_ipvs_mode(jump.rule) is of_ipvs_mode for jump in cleaned.jumps)
    chains = sum(
        (ChainKey(key.table, key.chain) in skeleton.IPVS_CHAINS) is of_ipvs_mode for key in cleaned.chains
    )
    counts = [counted(number, noun) for number, noun in ((jumps, "jump"), (chains, "chain")) if number]
    if counts:
        yield f"{cleaned.title}: {listed(counts)} {done}"
    if cleaned.guard_stays and not of_ipvs_mode:
        yield (
            f"{cleaned.title}: chain KUBE-FIREWALL stays: nothing else protects 127.0.0.0/8 from other hosts."
            " To remove the chain too, first set route_localnet to 0 in net.ipv4.conf."
        )


def _objects(cleaned: CleanedObjects, done: str, most: int | None) -> Iterator[str]:
    """Yield what happened to objects of one kind; name at most so many."""
    if cleaned.names:
        addresses = f" with {counted(len(cleaned.addresses), 'address')}" if cleaned.addresses else ""
        yield f"{counted(len(cleaned.names), cleaned.kind)}{addresses} {done}: {listed(cleaned.names, most)}"
    if cleaned.kept:
        verb = "stays" if len(cleaned.kept) == 1 else "stay"
        yield f"{counted(len(cleaned.kept), cleaned.kind)} of other programs {verb}: {listed(cleaned.kept, most)}"
