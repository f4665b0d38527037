"""A node whose rules were saved: in output of iptables-save and nft, as --rules names it, or in a bundle."""

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, NamedTuple

import click

from pykubeproxy.bundle.layout import FLOWS, NFT_RULESET, TABLES
from pykubeproxy.bundle.read import Bundle, InvalidBundle, read_bundle
from pykubeproxy.inspect.flows import FlowTable, parse_flow_table
from pykubeproxy.inspect.node import (
    NodeRules,
    NodeState,
    Origin,
    Question,
    ReadError,
    nftables_remarks,
    unread_rules,
)
from pykubeproxy.inspect.packets.packet import NodeNetwork, NodeRoute
from pykubeproxy.objects import Family, Node, family_of
from pykubeproxy.rules.inferred import inferred_facts
from pykubeproxy.rules.nft_list import NftRuleset, is_nft_list, read_nft_lists
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.rules.save_files import (
    MOST_BYTES,
    InvalidSave,
    SavedFile,
    SavedTables,
    of_backend,
    read_saves,
    tables_in_use,
)
from pykubeproxy.wording import listed

_STDIN = "standard input"
_GZIP = b"\x1f\x8b"
# The mark of a tar archive, and where it is.
_TAR, _TAR_AT = b"ustar", 257
# PowerShell writes UTF-16.
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class SavedNode(NamedTuple):
    """A node and its saved tables by family: those of iptables, and those of nftables.

    - `source`: where they are, such as "node1.txt"
    - `node`: as the source knows it; without a name if it does not
    - `given`: `addresses` are given on the command line, so they replace those of the Node
    - `advice`: what to do about missing tables; by default, add a file
    """

    source: str
    node: Node
    tables: Mapping[Family, SavedTables]
    addresses: tuple[str, ...] = ()
    routes: tuple[NodeRoute, ...] = ()
    given: bool = True
    advice: str = ""
    proxy: str = ""
    remarks: tuple[str, ...] = ()
    nftables: Mapping[Family, NftRuleset] = {}
    flows: FlowTable | None = None

    def nodes(self, question: Question) -> Iterator[NodeState]:
        """Yield the node. Raises ReadError if there are no rules of these families."""
        place = f"in {self.source}"
        native = {
            family: ruleset
            for family, ruleset in self.nftables.items()
            if ruleset.chains and question.nftables
        }
        present = [family for family in question.families if family in self.tables or family in native]
        if not present:
            if any(ruleset.chains for ruleset in self.nftables.values()):
                raise ReadError(f"this command reads no rules of nftables, and there are no others {place}")
            wanted = question.families[0]
            program = "ip6tables-save" if wanted is Family.IPV6 else "iptables-save"
            advice = self.advice or f"add the output of {program} with --rules"
            raise ReadError(f"there are no {wanted.value} rules {place}; {advice}")
        unseen = self._unseen(question.families) if question.nftables else ""
        state = NodeState(
            node=self.node,
            origin=Origin(f"rules {place}", place, self.proxy),
            rules={family: self._rules(family, question) for family in present},
            network=NodeNetwork(frozenset(self.addresses), self.routes),
            unread={
                unread_rules(family): f"there are none {place}"
                for family in question.families
                if family not in present
            },
            remarks=(
                *self.remarks,
                *(nftables_remarks(self.nftables.values()) if question.nftables else ()),
                *([unseen] if unseen else []),
            ),
            flows=self.flows,
        )
        if unseen and not (self.tables or state.in_nftables_mode):
            raise ReadError(unseen)  # no rules of a service proxy are left
        yield state

    def _unseen(self, families: Iterable[Family]) -> str:
        """Return which tables of these families nft does not show, as they are of iptables, and what to do; "" for none."""
        unseen = {
            f"{family.value} {name}"
            for family in families
            if family in self.nftables and family not in self.tables
            for name in self.nftables[family].iptables
        }
        if not unseen:
            return ""
        tables = listed(sorted(unseen))
        return f"the rules of iptables are missing ({tables}); add the output of iptables-save"

    def _rules(self, family: Family, question: Question) -> NodeRules:
        native = self.nftables.get(family) if question.nftables else None
        if family not in self.tables:
            return NodeRules(Ruleset(family, {}), nftables=native)
        tables = self.tables[family]
        facts = None
        if question.facts:
            of_family = tuple(address for address in self.addresses if family_of(address) is family)
            known = self.addresses if self.given else of_family if question.addresses else ()
            facts = inferred_facts(tables.ruleset, known)
        return NodeRules(tables.ruleset, tables.counters, tables.backend, facts, native)


def saved_node(paths: Sequence[str], backend: str, addresses: tuple[str, ...] = ()) -> SavedNode:
    """Read the rules of one node from files, with "-" from standard input. Raises ReadError."""
    if len(set(paths)) < len(paths):
        raise ReadError("--rules names a file twice; give one file, or one for each family")
    names = [_STDIN if path == "-" else path for path in paths]
    files = [SavedFile(name, _text(path)) for name, path in zip(names, paths, strict=True)]
    nft_lists = [file for file in files if is_nft_list(file.text)]
    saves = [file for file in files if file not in nft_lists]
    try:
        native = read_nft_lists([file.text for file in nft_lists], listed(file.name for file in nft_lists))
        tables = read_saves(saves) if saves else ()
    except InvalidSave as error:
        raise ReadError(str(error)) from None
    chosen, remarks = _chosen(tables, backend, "--rules") if saves else ((), ())
    return SavedNode(listed(names), Node(""), _by_family(chosen), addresses, remarks=remarks, nftables=native)


def open_bundle(path: str) -> Bundle:
    """Read the bundle at a path, with "-" from standard input. Raises ReadError."""
    name = _STDIN if path == "-" else path
    try:
        with click.open_file(path, "rb") as file:
            return read_bundle(file, name)
    except OSError as error:
        raise ReadError(f"--bundle: cannot read {name}: {error.strerror or error}") from None
    except InvalidBundle as error:
        raise ReadError(f"--bundle: {error}") from None


def bundled_flows(bundle: Bundle) -> FlowTable:
    """Return the flows in a bundle."""
    if FLOWS in bundle.files:
        return parse_flow_table(bundle.files[FLOWS].decode(errors="replace"))
    return FlowTable(
        unread=f"{bundle.name} has no flows ({bundle.why_missing(FLOWS)}); run `pykubeproxy bundle --flows` on the node"
    )


def bundled_node(bundle: Bundle, backend: str, addresses: tuple[str, ...] = ()) -> SavedNode:
    """Return the node of a bundle; `addresses` replace those in the bundle. Raises ReadError."""
    saves = tuple(_saves(bundle))
    try:
        tables = read_saves(saves) if saves else ()
        nft_lists = filter(None, [bundle.files.get(NFT_RULESET)])
        native = read_nft_lists(nft_lists, f"{bundle.name}, {NFT_RULESET}")
        known = addresses or bundle.addresses() or _node_addresses(bundle)
        routes = tuple(
            NodeRoute(route.network, route.interface) for route in bundle.routes() if route.interface
        )
    except (InvalidSave, InvalidBundle) as error:
        raise ReadError(str(error)) from None
    chosen, remarks = _chosen(tables, backend, "the bundle")
    return SavedNode(
        bundle.name,
        Node(bundle.manifest.node),
        _by_family(chosen),
        known,
        routes,
        given=bool(addresses),
        advice=_why_no_tables(bundle),
        proxy=bundle.manifest.proxy,
        remarks=remarks,
        nftables=native,
        flows=bundled_flows(bundle),
    )


def _node_addresses(bundle: Bundle) -> tuple[str, ...]:
    from pykubeproxy.nodes.objects import NoObjects, bundled_agent  # decodes all objects

    try:
        objects, _ = bundled_agent(bundle)
        return objects.node.addresses
    except NoObjects:
        return ()


def _by_family(tables: Sequence[SavedTables]) -> Mapping[Family, SavedTables]:
    return {table.ruleset.family: table for table in tables}


def _chosen(
    tables: Sequence[SavedTables], setting: str, place: str
) -> tuple[Sequence[SavedTables], tuple[str, ...]]:
    """Return the tables of one backend, for "auto" the one that serves the node, and remarks. Raises ReadError."""
    if setting != "auto":
        if found := of_backend(tables, setting):
            return found, ()
        raise ReadError(
            f"{place} has no output of iptables-{setting}-save; remove --iptables-backend, or add that output"
        )
    used = tables_in_use(tables)
    if not used.other:
        return used.tables, ()
    remark = (
        f"this shows the {used.backend} tables. The {used.other} tables have service-proxy rules too, and packets pass"
        f" both. Use --iptables-backend {used.other} to see them."
    )
    return used.tables, (remark,)


def _saves(bundle: Bundle) -> Iterator[SavedFile]:
    """Yield the files with tables; a backend without tables has an empty one, or one of comments."""
    for name in TABLES:
        text = bundle.files.get(name, b"").decode("utf-8", "surrogateescape")
        if text.startswith("*") or "\n*" in text:
            yield SavedFile(f"{bundle.name}, {name}", text)


def _why_no_tables(bundle: Bundle) -> str:
    reasons = dict.fromkeys(
        file.error for file in bundle.manifest.files if file.name in TABLES and file.error
    )
    first = next(iter(reasons), "")
    return f"run `pykubeproxy bundle` again as root on the node{f' ({first})' if first else ''}"


def _text(path: str) -> str:
    """Read a file, with any line ends. Raises ReadError."""
    try:
        with click.open_file(path, "rb") as file:
            raw = _limited(path, file)
        if raw.startswith(_GZIP):
            with gzip.open(io.BytesIO(raw)) as unpacked:
                raw = _limited(path, unpacked)
        if raw[_TAR_AT:].startswith(_TAR):
            raise ReadError(f"--rules: {path} is a tar archive; use --bundle for a bundle, or else unpack it")
        if raw.startswith(_UTF16):
            return raw.decode("utf-16")
    except OSError as error:
        raise ReadError(f"--rules: cannot read {path}: {error.strerror or error}") from None
    except (EOFError, zlib.error, UnicodeError) as error:
        raise ReadError(f"--rules: {path} is damaged: {error}; copy it again") from None
    # The byte order mark is no text.
    return raw.decode("utf-8-sig", "surrogateescape")


def _limited(path: str, file: IO[bytes] | gzip.GzipFile) -> bytes:
    raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise ReadError(
            f"--rules: {path} has more than {MOST_BYTES >> 20} MiB; give the output of iptables-save"
        )
    return raw
