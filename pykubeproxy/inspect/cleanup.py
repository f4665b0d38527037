"""The report of cleanup: what was removed from the tables, and what else kube-proxy's other modes left."""

from collections.abc import Iterator

import msgspec

from pykubeproxy import API_VERSION
from pykubeproxy.kernel import Iptables
from pykubeproxy.kernel.leftovers import Leftovers
from pykubeproxy.rules import ipvs_mode
from pykubeproxy.rules.removal import Removal, is_of_ipvs_mode
from pykubeproxy.wording import counted, listed

# Names of objects that a line shows, unless the report is verbose.
_NAMES = 4


class Cleaned(msgspec.Struct, frozen=True):
    """The removal from the tables of one backend and family; `failure` is "" or why it failed."""

    iptables: Iptables
    removed: Removal = Removal()
    text: str = ""
    failure: str = ""


class Report(msgspec.Struct, frozen=True):
    """What was removed, or would be in a dry run; `others` is empty if other modes were not to be cleaned up."""

    tables: tuple[Cleaned, ...]
    others: tuple[Leftovers, ...]
    dry_run: bool

    @property
    def succeeded(self) -> bool:
        """Whether everything could be removed."""
        return not any(it.failure for it in self.tables) and not any(it.failure for it in self.others)


def document(report: Report) -> dict[str, object]:
    """The report as a JSON document of version pykubeproxy/v1.

    {"apiVersion", "dryRun": bool,
     "tables": [{"backend": "nft" or "legacy", "family",
       "jumps": [{"table", "chain", "rule"}], removed from built-in chains,
       "chains": [{"table", "chain"}], removed,
       "kept": [{"table", "chain"}], only emptied because foreign rules jump to them,
       "guardStays": bool, KUBE-FIREWALL stays because nothing else protects loopback addresses,
       "input": for iptables-restore, "error": why the removal failed, or null}],
     "otherModes": [{"mode": "ipvs" or "nftables", "kind": "virtual server", "interface", "ipset" or "table",
       "names": [str], removed,
       "addresses": [str], removed with the interface,
       "kept": [str], created by other programs,
       "error": why the removal failed, or null}]}

    "tables" has an entry for each backend and family whose commands are installed. "otherModes" has an entry for each
    kind with --all-modes, else none. Keys may be added.
    """
    return {
        "apiVersion": API_VERSION,
        "dryRun": report.dry_run,
        "tables": [
            {
                "backend": it.iptables.backend.value,
                "family": it.iptables.family.value,
                "jumps": [{**key._asdict(), "rule": rule} for key, rule in it.removed.jumps],
                "chains": [key._asdict() for key in it.removed.deleted],
                "kept": [key._asdict() for key in it.removed.kept],
                "guardStays": it.removed.guard_stays,
                "input": it.text,
                "error": it.failure or None,
            }
            for it in report.tables
        ],
        "otherModes": [
            {
                "mode": it.mode,
                "kind": it.kind,
                "names": it.names,
                "addresses": it.addresses,
                "kept": it.kept,
                "error": it.failure or None,
            }
            for it in report.others
        ],
    }


def text(report: Report, verbose: bool = False) -> Iterator[str]:
    """Yield lines on what was removed, by mode if other modes were cleaned up too."""
    if verbose:
        yield from (line for it in report.tables for line in it.text.splitlines())
    done = "would be removed" if report.dry_run else "removed"
    modes: dict[str, list[str]] = {"iptables": [], "ipvs": [], "nftables": []}
    for cleaned in report.tables:
        modes["iptables"] += _rules(cleaned, done, of_ipvs_mode=False)
        modes["ipvs"] += _rules(cleaned, done, of_ipvs_mode=True)
    for left in report.others:
        modes[left.mode] += _objects(left, done, verbose)
    for mode, lines in modes.items():
        if lines and report.others:
            yield f"{mode} mode:"
        yield from (f"  {line}" if report.others else line for line in lines)
    empty = all(it.removed.is_empty() for it in report.tables) and not any(it.names for it in report.others)
    if empty and report.succeeded:
        yield "Nothing to remove."


def problems(report: Report) -> Iterator[str]:
    """Yield lines on what failed, and on chains that could only be emptied."""
    for left in report.others:
        if left.failure:
            yield f"Error: {left.mode} mode: {left.failure}"
    for cleaned in report.tables:
        if cleaned.failure:
            yield f"Error: {_name(cleaned)}: {cleaned.failure}"
        for key in cleaned.removed.kept:
            yield (
                f"Warning: {_name(cleaned)}: foreign rules jump to chain {key.chain} of table {key.table},"
                f" so it {'would only be' if report.dry_run else 'was only'} emptied; remove those rules first"
            )


def _rules(cleaned: Cleaned, done: str, of_ipvs_mode: bool) -> Iterator[str]:
    """Yield what happened to the rules that only ipvs mode writes, or to all others."""
    removed = cleaned.removed
    jumps = sum(is_of_ipvs_mode(rule) is of_ipvs_mode for _, rule in removed.jumps)
    chains = sum((key in ipvs_mode.CHAINS) is of_ipvs_mode for key in removed.deleted)
    counts = [counted(number, noun) for number, noun in ((jumps, "jump"), (chains, "chain")) if number]
    if counts:
        yield f"{_name(cleaned)}: {listed(counts)} {done}"
    if removed.guard_stays and not of_ipvs_mode:
        yield (
            f"{_name(cleaned)}: chain KUBE-FIREWALL stays: nothing else protects 127.0.0.0/8 from other hosts."
            " To remove the chain too, first set route_localnet to 0 in net.ipv4.conf."
        )


def _objects(left: Leftovers, done: str, verbose: bool) -> Iterator[str]:
    """Yield what happened to objects of one kind."""
    limit = None if verbose else _NAMES
    if left.names:
        addresses = f" with {counted(len(left.addresses), 'address')}" if left.addresses else ""
        yield f"{counted(len(left.names), left.kind)}{addresses} {done}: {listed(left.names, limit)}"
    if left.kept:
        verb = "stays" if len(left.kept) == 1 else "stay"
        yield f"{counted(len(left.kept), left.kind)} of other programs {verb}: {listed(left.kept, limit)}"


def _name(cleaned: Cleaned) -> str:
    return f"{cleaned.iptables.backend.value}, {cleaned.iptables.family.value}"
