"""Watch what other programs write to the tables we use: at once on nft, twice a second on legacy.

The agent writes through tables with `own_writes`, so that the watch can tell its writes from those of others.

On nft, the kernel reports the changed objects of each transaction over netlink and, at its end, the process. An event
without the text KUBE- costs only a search for it. The event of a renamed chain has only its new name. So an event for a
chain that is neither new nor deleted makes the whole table suspect.

On legacy, the watch compares the shape of each table. A comparison takes microseconds, and misses a rule that replaces
another of the same size. Only existing tables are read: reading another one would create it.
"""

import contextlib
import errno
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from pykubeproxy.kernel import netlink
from pykubeproxy.kernel.iptables import Backend
from pykubeproxy.kernel.legacy import Shape, legacy_tables, shape
from pykubeproxy.kernel.netlink import ADDRESS_FAMILY
from pykubeproxy.kernel.nftables import generation
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import BUILT_IN, ChainKey

# The tables that the proxy uses.
TABLES = ("mangle", "filter", "nat")
_SOL_NETLINK, _ADD_MEMBERSHIP, _DROP_MEMBERSHIP = 270, 1, 2
_GROUP = 7  # NFNLGRP_NFTABLES
_RECEIVE_BUFFER_FORCED = 33  # SO_RCVBUFFORCE
# linux/netfilter/nf_tables.h
_DEL_TABLE, _NEW_CHAIN, _DEL_CHAIN, _NEW_RULE, _DEL_RULE, _NEW_GENERATION = (
    10 << 8 | n for n in (2, 3, 5, 6, 8, 15)
)
_TABLE, _RULE_CHAIN, _CHAIN_HANDLE, _CHAIN_NAME = 1, 2, 2, 3
_NAME_AT = {
    _NEW_CHAIN: _CHAIN_NAME,
    _DEL_CHAIN: _CHAIN_NAME,
    _NEW_RULE: _RULE_CHAIN,
    _DEL_RULE: _RULE_CHAIN,
}
_PROCESS, _PROCESS_NAME = 2, 3
_FAMILIES = {int(domain): family for family, domain in ADDRESS_FAMILY.items()}
_OURS = b"KUBE-"
_NUMBER = struct.Struct(">I")
# The receive buffer, in bytes as the kernel counts them: enough for some thousands of rules.
_BUFFER = 4 << 20
# Stop listening while we write more characters than this: for 60,000 rules, the events take the kernel a tenth of the
# time of writing them.
_LONG = 1 << 18
_SECONDS = 0.5


class ExternalWrite(msgspec.Struct, frozen=True):
    """Another program wrote to a family's tables: to `chains`, or somewhere in `tables` if the chains are not known.

    `chains` are named KUBE-…, or lost a rule that jumps to such a chain. `writer` is the program, such as
    `"iptables" (process 4711)`, or "" if the kernel does not report it; the number is from the initial pid namespace.
    """

    family: Family
    tables: frozenset[str] = frozenset()
    chains: frozenset[ChainKey] = frozenset()
    writer: str = ""

    @classmethod
    def anywhere(cls, family: Family) -> "ExternalWrite":
        """Return a write to unknown tables of a family."""
        return cls(family, frozenset(TABLES))


class TableCounts(msgspec.Struct, frozen=True):
    """How many entries a family's tables hold after a write, by table: one for a rule, two for a chain.

    `ours` are those of our chains. `others` are those of foreign chains, in the tables that were read before the write;
    the numbers for other tables are those after the last write. `added` is by how many the write changed `others`.
    """

    ours: Mapping[str, int] = {}
    others: Mapping[str, int] = {}
    added: Mapping[str, int] = {}


class NftWatch:
    """Call `report` for writes of others, from the thread in `run` or the one in `own_writes`."""

    name = "drift"

    def __init__(self, report: Callable[[ExternalWrite], None]) -> None:
        self._report = report
        self._lock = threading.Lock()
        # The processes that write for us, while they do: later the kernel may reuse their ids.
        self._own: set[int] = set()
        self._writing = False
        # The chains that the current transaction has changed; one without a name stands for its whole table.
        self._touched: dict[Family, set[ChainKey]] = {}
        # The highest chain handle of each table: handles only grow, so a new chain has a higher one.
        self._highest: dict[tuple[Family, str], int] = {}
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, netlink.NETLINK_NETFILTER)
        with contextlib.suppress(OSError):
            # Needs CAP_NET_ADMIN in the initial user namespace; without it the buffer stays smaller.
            self._socket.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER_FORCED, _BUFFER)
        self._socket.bind((0, 0))
        self._socket.setblocking(False)
        self._join()

    def command_started(self, process: int) -> None:
        """Record that a command of ours runs in this process."""
        if self._writing:
            self._own.add(process)

    @contextlib.contextmanager
    def own_writes(self, family: Family) -> Iterator[Callable[[str], None]]:  # noqa: ARG002
        """Do not report what the processes given to `command_started` write inside this context.

        Stop listening while a long text is written. Then compare generation numbers, of which each transaction takes one,
        to find out whether another program wrote at the same time.
        """
        before = generation()
        self._writing = True
        written = _WriteSize(self._leave)
        try:
            yield written.note
        finally:
            with self._lock:
                try:
                    if written.is_long:
                        self._rejoin(before + written.blocks)
                    self._drain()
                finally:
                    self._writing = False
                    self._own.clear()

    def synced(self, family: Family, counts: TableCounts) -> None:
        """Do nothing: the events suffice."""

    def run(self) -> None:
        """Listen for events; never return."""
        while True:
            select.select([self._socket], [], [])
            with self._lock:
                self._drain()

    def _join(self) -> None:
        self._socket.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, _GROUP)

    def _rejoin(self, expected: int) -> None:
        """Listen again; report unknown writes unless the last transaction has the `expected` number."""
        self._highest.clear()
        alone = False
        try:
            self._join()
            alone = generation() == expected
        finally:
            if not alone:
                self._anything()

    def _leave(self) -> None:
        """Stop listening, and drop the current transaction: its other events will not arrive."""
        with self._lock:
            self._socket.setsockopt(_SOL_NETLINK, _DROP_MEMBERSHIP, _GROUP)
            self._drain()
            self._touched.clear()

    def _drain(self) -> None:
        """Read all events that have arrived."""
        while True:
            try:
                self._read(self._socket.recv(netlink.READ))
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                # Events were lost: the buffer was full.
                self._touched.clear()
                self._anything()

    def _read(self, messages: bytes) -> None:
        start = 0
        while start < len(messages):
            length, kind, _, _, port = netlink.HEADER.unpack_from(messages, start)
            message = messages[start : start + length]
            if kind == _NEW_GENERATION:
                self._ended(message, port)
            elif kind in _NAME_AT:
                self._note(kind, message)
            elif kind == _DEL_TABLE:
                self._highest.clear()
            start += (length + 3) & ~3

    def _note(self, kind: int, message: bytes) -> None:
        """Record a chain or rule that was added or deleted. In chains of others only deleted jumps to ours matter."""
        family = _FAMILIES.get(message[netlink.HEADER.size])
        if family is None or not (kind == _NEW_CHAIN or _OURS in message):
            return
        values = netlink.attributes(message[netlink.HEADER.size + 4 :])
        key = ChainKey(_text(values.get(_TABLE, b"")), _text(values.get(_NAME_AT[kind], b"")))
        if key.table not in TABLES:
            return
        if kind == _NEW_CHAIN and not self._is_new((family, key.table), values.get(_CHAIN_HANDLE, b"")):
            # A built-in chain got another policy or other counters.
            key = key if key.chain in BUILT_IN else ChainKey(key.table, "")
        if not key.chain or key.chain.startswith("KUBE-") or kind == _DEL_RULE:
            self._touched.setdefault(family, set()).add(key)

    def _is_new(self, place: tuple[Family, str], handle: bytes) -> bool:
        """Return whether a chain is new, by its handle; false for the first handle seen of a table."""
        number, highest = int.from_bytes(handle, "big"), self._highest.get(place)
        self._highest[place] = max(number, highest or 0)
        return highest is not None and number > highest

    def _ended(self, message: bytes, port: int) -> None:
        touched, self._touched = self._touched, {}
        # iptables lets the kernel choose its netlink port: the process id in our pid namespace, if that is free.
        if port in self._own:
            return
        values = netlink.attributes(message[netlink.HEADER.size + 4 :])
        writer = f'"{_text(values.get(_PROCESS_NAME, b""))}" (process {_number(values.get(_PROCESS, b""))})'
        for family, keys in touched.items():
            tables = frozenset(key.table for key in keys if not key.chain)
            self._report(ExternalWrite(family, tables, frozenset(key for key in keys if key.chain), writer))

    def _anything(self) -> None:
        for family in Family:
            self._report(ExternalWrite.anywhere(family))


class _WriteSize:
    """Count the characters and blocks of our writes, and call `when_long` once they are long."""

    def __init__(self, when_long: Callable[[], None]) -> None:
        self.length = self.blocks = 0
        self._when_long = when_long

    @property
    def is_long(self) -> bool:
        return self.length > _LONG

    def note(self, text: str) -> None:
        was_long = self.is_long
        self.length += len(text)
        self.blocks += text.count("COMMIT\n")
        if self.is_long and not was_long:
            self._when_long()


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("utf-8", "replace")


def _number(raw: bytes) -> int:
    return int(_NUMBER.unpack(raw)[0]) if len(raw) == _NUMBER.size else 0


class LegacyWatch:
    """Call `report` for writes of others, from the thread in `run` or the one in `own_writes`."""

    name = "drift"

    def __init__(self, report: Callable[[ExternalWrite], None]) -> None:
        self._report = report
        self._lock = threading.Lock()
        # The tables of each family that the agent writes, as last read.
        self._shapes: dict[Family, dict[str, Shape]] = {}
        # How many entries foreign chains had then.
        self._others: dict[Family, dict[str, int]] = {}

    def command_started(self, process: int) -> None:
        """Do nothing: the kernel does not report who wrote a table."""

    @contextlib.contextmanager
    def own_writes(self, family: Family) -> Iterator[Callable[[str], None]]:
        """Do not report changes inside this context."""
        with self._lock:
            self._compare(family)
            try:
                yield lambda _: None
            finally:
                existing = [table for table in legacy_tables(family) if table in TABLES]
                self._shapes[family] = {table: shape(family, table) for table in existing}

    def synced(self, family: Family, counts: TableCounts) -> None:
        """Record how many entries the tables hold after a sync.

        An unexpected number of foreign entries means that another program wrote between our own writes.
        """
        with self._lock:
            shapes = self._shapes.get(family, {})
            expected = {**self._others.get(family, {}), **counts.others}
            expected = {table: expected.get(table, 0) + counts.added.get(table, 0) for table in shapes}
            others = {table: size.entries - counts.ours.get(table, 0) for table, size in shapes.items()}
            self._others[family] = others
            if wrong := frozenset(table for table in shapes if others[table] != expected[table]):
                self._report(ExternalWrite(family, wrong))

    def run(self) -> None:
        """Compare twice a second; never return."""
        while True:
            time.sleep(_SECONDS)
            with self._lock:
                for family in [*self._shapes]:
                    self._compare(family)

    def _compare(self, family: Family) -> None:
        known = self._shapes.get(family, {})
        now = {table: shape(family, table) for table in known}
        if changed := frozenset(table for table in known if now[table] != known[table]):
            self._shapes[family] = now
            others = self._others.get(family, {})
            for table in changed & others.keys():
                others[table] += now[table].entries - known[table].entries
            self._report(ExternalWrite(family, changed))


class TableWatch(Protocol):
    """A watch that starts with its constructor, in the network namespace of the calling thread."""

    name: str

    def command_started(self, process: int) -> None:
        """Record that a command of ours runs in this process."""

    def own_writes(self, family: Family) -> AbstractContextManager[Callable[[str], None]]:
        """Do not report what the processes given to `command_started` write inside this context.

        Yields a function to call with each text before it is written. Entering and leaving raise OSError if the kernel
        does not answer.
        """

    def synced(self, family: Family, counts: TableCounts) -> None:
        """Record that a sync is complete, and how many entries the tables hold now."""

    def run(self) -> None:
        """Report writes of others; never return."""


def watch_tables(backend: Backend, report: Callable[[ExternalWrite], None]) -> TableWatch:
    """Watch the tables mangle, filter and nat; `report` is called from several threads, one at a time.

    Raises OSError if the kernel does not allow it.
    """
    return NftWatch(report) if backend is Backend.NFT else LegacyWatch(report)
