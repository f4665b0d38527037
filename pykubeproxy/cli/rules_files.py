"""Read the rules of another node from files, as --rules names them."""

import gzip
import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Literal, NamedTuple

import click

from pykubeproxy.cli.terminal import click_errors, echo_line
from pykubeproxy.inspect.filter import ServiceFilter
from pykubeproxy.inspect.trace.packet import Host, Route
from pykubeproxy.objects import Family, family_of
from pykubeproxy.rules.context import KernelFacts
from pykubeproxy.rules.in_use import of_backend, tables_in_use
from pykubeproxy.rules.inferred import inferred_facts
from pykubeproxy.rules.ruleset import Counters, Ruleset
from pykubeproxy.rules.saves import MOST_BYTES, InvalidSave, SavedFile, SavedTables, read_saves
from pykubeproxy.wording import listed

_GZIP = b"\x1f\x8b"
# The mark of a tar archive, and where it is.
_TAR, _TAR_AT = b"ustar", 257
# PowerShell writes UTF-16.
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class SavedRules(NamedTuple):
    """The rules of a node from elsewhere than its kernel; `source` names where. See NodeRules.

    - `given`: the addresses are given, not read, so that they replace those of the Node
    - `advice`: what to do about missing tables; by default, add a file
    """

    source: str
    tables: Mapping[Family, SavedTables]
    addresses: tuple[str, ...] = ()
    routes: tuple[Route, ...] = ()
    given: bool = True
    advice: str = ""

    @property
    def title(self) -> str:
        """Name the rules, as one side of a comparison."""
        return f"rules {self.place}"

    @property
    def place(self) -> str:
        """Name the place in a sentence."""
        return f"in {self.source}"

    def counted(
        self,
        families: Sequence[Family],
        query: ServiceFilter,  # noqa: ARG002
    ) -> Sequence[tuple[Ruleset, Counters]]:
        """Return the rules and counters of these families."""
        return [(self.tables[it].ruleset, self.tables[it].counters) for it in self._present(families)]

    def for_packets(self, family: Family) -> tuple[Ruleset, Host]:
        """Return the rules of a family and what is known about the node."""
        self._present((family,))
        return self.tables[family].ruleset, Host(frozenset(self.addresses), self.routes)

    def with_facts(
        self,
        families: Sequence[Family],
        with_addresses: bool,
    ) -> Iterator[tuple[Ruleset, KernelFacts]]:
        """Yield the rules of these families, and the facts about the kernel that follow from them."""
        present = self._present(families)
        for family in families:
            if family not in present:
                echo_line(
                    f"{family.value} is not compared: there are no {family.value} rules {self.place}.",
                    err=True,
                )
        for family in present:
            ruleset = self.tables[family].ruleset
            of_family = tuple(it for it in self.addresses if family_of(it) is family)
            known = self.addresses if self.given else of_family if with_addresses else ()
            yield ruleset, inferred_facts(ruleset, known)

    def _present(self, families: Sequence[Family]) -> Sequence[Family]:
        """Return the families that are there. Raises ClickException if there is none."""
        if found := [family for family in families if family in self.tables]:
            return found
        wanted = families[0]
        program = "ip6tables-save" if wanted is Family.IPV6 else "iptables-save"
        default = f"add the output of {program} with --rules"
        raise click.ClickException(
            f"there are no {wanted.value} rules {self.place}; {self.advice or default}"
        )


def read_rules(
    paths: Sequence[str], backend: Literal["auto", "nft", "legacy"], addresses: tuple[str, ...]
) -> SavedRules:
    """Read the rules of one node from files. Raises ClickException."""
    if len(set(paths)) < len(paths):
        raise click.UsageError("--rules names a file twice; give one file, or one for each family")
    with click_errors(InvalidSave):
        tables = read_saves(SavedFile("standard input" if it == "-" else it, _text(it)) for it in paths)
    chosen = {it.ruleset.family: it for it in chosen_tables(tables, backend, "--rules")}
    names = listed(["standard input" if it == "-" else it for it in paths], len(paths))
    return SavedRules(names, chosen, addresses)


def chosen_tables(tables: Sequence[SavedTables], setting: str, place: str) -> Sequence[SavedTables]:
    """Return the tables of one backend; for "auto", the one whose rules serve the node. `place` has the tables.

    If both backends have service-proxy rules, a note goes to standard error. Raises ClickException.
    """
    if setting != "auto":
        found = of_backend(tables, setting)
        if not found:
            raise click.ClickException(
                f"{place} has no output of iptables-{setting}-save; remove --iptables-backend, or add that output"
            )
        return found
    used = tables_in_use(tables)
    if used.other:
        echo_line(
            f"Note: this shows the {used.backend} tables. The {used.other} tables have service-proxy rules too, and"
            f" packets pass both. Use --iptables-backend {used.other} to see them.",
            err=True,
        )
    return used.tables


def _text(path: str) -> str:
    """Read a file, with any line ends. Raises ClickException."""
    try:
        with click.open_file(path, "rb") as file:
            raw = _limited(path, file)
        if raw.startswith(_GZIP):
            with gzip.open(io.BytesIO(raw)) as unpacked:
                raw = _limited(path, unpacked)
        if raw[_TAR_AT:].startswith(_TAR):
            raise click.ClickException(
                f"--rules: {path} is a tar archive; use --bundle for a bundle, or else unpack it"
            )
        if raw.startswith(_UTF16):
            return raw.decode("utf-16")
    except OSError as error:
        raise click.ClickException(f"--rules: cannot read {path}: {error.strerror or error}") from None
    except (EOFError, zlib.error, UnicodeError) as error:
        raise click.ClickException(f"--rules: {path} is damaged: {error}; copy it again") from None
    # The byte order mark is no text.
    return raw.decode("utf-8-sig", "surrogateescape")


def _limited(path: str, file: IO[bytes] | gzip.GzipFile) -> bytes:
    raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise click.ClickException(
            f"--rules: {path} has more than {MOST_BYTES >> 20} MiB; give the output of iptables-save"
        )
    return raw
