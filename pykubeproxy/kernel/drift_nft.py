"""What others write into the tables of iptables-nft: the kernel's own word of it, within milliseconds.

The kernel tells of each transaction what it touched, and at its end who it was. Rules and chains that have nothing to do
with KUBE-… chains cost a search for that word, and wake nobody. Of a chain that is renamed only the new name is told: so
whatever happens to a chain that is neither new nor gone has its whole table looked at.
"""

import contextlib
import errno
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator

from pykubeproxy.kernel import netfilter
from pykubeproxy.kernel.domain import DOMAIN
from pykubeproxy.kernel.foreign import TABLES, ExternalWrite, TableCounts
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import BUILT_IN, ChainKey

_SOL_NETLINK, _ADD_MEMBERSHIP, _DROP_MEMBERSHIP = 270, 1, 2
_GROUP = 7  # NFNLGRP_NFTABLES
_RECEIVE_BUFFER_FORCED = 33  # SO_RCVBUFFORCE
# linux/netfilter/nf_tables.h
_DEL_TABLE, _NEW_CHAIN, _DEL_CHAIN, _NEW_RULE, _DEL_RULE, _NEW_GENERATION = (
    10 << 8 | n for n in (2, 3, 5, 6, 8, 15)
)
_GET_GENERATION = 10 << 8 | 16
_TABLE, _RULE_CHAIN, _CHAIN_HANDLE, _CHAIN_NAME = 1, 2, 2, 3
_NAME_AT = {
    _NEW_CHAIN: _CHAIN_NAME,
    _DEL_CHAIN: _CHAIN_NAME,
    _NEW_RULE: _RULE_CHAIN,
    _DEL_RULE: _RULE_CHAIN,
}
_GENERATION, _PROCESS, _PROCESS_NAME = 1, 2, 3
_FAMILIES = {int(domain): family for family, domain in DOMAIN.items()}
_OURS = b"KUBE-"
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_NUMBER = struct.Struct(">I")
_READ = 65536
# What may wait to be read, in bytes as the kernel counts them; some thousand rules.
_BUFFER = 4 << 20
# Telling us of 60,000 rules takes the kernel a tenth of the time that they take to be written: rather not from so
# many characters of ours on.
_LONG = 1 << 18


class NftWatch:
    """Calls `heard` for what others write into tables of iptables-nft, in `run` or in the thread that is `writing`."""

    name = "drift"

    def __init__(self, heard: Callable[[ExternalWrite], None]) -> None:
        self._heard = heard
        self._lock = threading.Lock()
        # The processes that write for us, as long as they do: others may get their numbers after that.
        self._own: set[int] = set()
        self._writing = False
        # What the transaction that is being told of has touched; a chain without a name stands for its whole table.
        self._touched: dict[Family, set[ChainKey]] = {}
        # The highest handle that a chain of a table had: the kernel counts them up, so that a new one's is higher.
        self._highest: dict[tuple[Family, str], int] = {}
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, netfilter.NETLINK_NETFILTER)
        with contextlib.suppress(OSError):
            # Without CAP_NET_ADMIN in the first user namespace there is less room.
            self._socket.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER_FORCED, _BUFFER)
        self._socket.bind((0, 0))
        self._socket.setblocking(False)
        self._join()

    def started(self, process: int) -> None:
        """A command of ours runs in this process."""
        if self._writing:
            self._own.add(process)

    @contextlib.contextmanager
    def writing(self, family: Family, text: Iterable[str]) -> Iterator[Iterable[str]]:  # noqa: ARG002
        """What comes meanwhile from processes named to `started` is ours.

        Of a long text the rest is written without listening; whether somebody else wrote at the same time the numbers of
        generations then tell: each block has one.
        """
        before = _generation()
        self._writing = True
        passed = _Passed(text, self._leave)
        try:
            yield passed
        finally:
            with self._lock:
                if passed.length > _LONG:
                    self._highest.clear()
                    self._join()
                    if _generation() - before != passed.blocks:
                        self._anything()
                self._drain()
                self._writing = False
                self._own.clear()

    def settled(self, family: Family, held: TableCounts) -> None:
        """All that came meanwhile was heard."""

    def run(self) -> None:
        """Listen, for ever."""
        while True:
            select.select([self._socket], [], [])
            with self._lock:
                self._drain()

    def _join(self) -> None:
        self._socket.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, _GROUP)

    def _leave(self) -> None:
        """Hear no more; of a transaction that was being told of, the rest will not come."""
        with self._lock:
            self._socket.setsockopt(_SOL_NETLINK, _DROP_MEMBERSHIP, _GROUP)
            self._drain()
            self._touched.clear()

    def _drain(self) -> None:
        """Take all that is there."""
        while True:
            try:
                self._read(self._socket.recv(_READ))
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                # More came than there was room for.
                self._touched.clear()
                self._anything()

    def _read(self, messages: bytes) -> None:
        start = 0
        while start < len(messages):
            length, kind, _, _, port = _HEADER.unpack_from(messages, start)
            message = messages[start : start + length]
            if kind == _NEW_GENERATION:
                self._ended(message, port)
            elif kind in _NAME_AT:
                self._note(kind, message)
            elif kind == _DEL_TABLE:
                self._highest.clear()
            start += (length + 3) & ~3

    def _note(self, kind: int, message: bytes) -> None:
        """A chain or a rule came or went. Of those in chains of others only rules that lead to ours count, going."""
        family = _FAMILIES.get(message[_HEADER.size])
        if family is None or not (kind == _NEW_CHAIN or _OURS in message):
            return
        said = netfilter.attributes(message[_HEADER.size + 4 :])
        key = ChainKey(_text(said.get(_TABLE, b"")), _text(said.get(_NAME_AT[kind], b"")))
        if key.table not in TABLES:
            return
        if kind == _NEW_CHAIN and not self._is_new((family, key.table), said.get(_CHAIN_HANDLE, b"")):
            # Whatever has the name of a built-in chain got another policy, or other counters.
            key = key if key.chain in BUILT_IN else ChainKey(key.table, "")
        if not key.chain or key.chain.startswith("KUBE-") or kind == _DEL_RULE:
            self._touched.setdefault(family, set()).add(key)

    def _is_new(self, place: tuple[Family, str], handle: bytes) -> bool:
        """Whether a chain has just been made; not even if it has, as long as no other chain's handle was seen."""
        number, highest = int.from_bytes(handle, "big"), self._highest.get(place)
        self._highest[place] = max(number, highest or 0)
        return highest is not None and number > highest

    def _ended(self, message: bytes, port: int) -> None:
        touched, self._touched = self._touched, {}
        # iptables leaves its port to the kernel, which takes the number of the process, as we see it, where it can.
        if port in self._own:
            return
        said = netfilter.attributes(message[_HEADER.size + 4 :])
        writer = f'"{_text(said.get(_PROCESS_NAME, b""))}" (process {_number(said.get(_PROCESS, b""))})'
        for family, keys in touched.items():
            tables = frozenset(key.table for key in keys if not key.chain)
            self._heard(ExternalWrite(family, tables, frozenset(key for key in keys if key.chain), writer))

    def _anything(self) -> None:
        for family in Family:
            self._heard(ExternalWrite.anywhere(family))


class _Passed:
    """Text on its way: how much has passed, and in how many blocks. Calls `too_long` when it turns out to be long."""

    def __init__(self, text: Iterable[str], too_long: Callable[[], None]) -> None:
        self.length = self.blocks = 0
        self._text, self._too_long = text, too_long

    def __iter__(self) -> Iterator[str]:
        for piece in self._text:
            was_short = self.length <= _LONG
            self.length += len(piece)
            self.blocks += piece.count("COMMIT\n")
            if was_short and self.length > _LONG:
                self._too_long()
            yield piece


def _generation() -> int:
    """The number of the last transaction of this network namespace."""
    answer = netfilter.ask(_GET_GENERATION, 0, socket.AF_UNSPEC, b"")
    return _number(netfilter.attributes(answer)[_GENERATION])


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("utf-8", "replace")


def _number(raw: bytes) -> int:
    return int(_NUMBER.unpack(raw)[0]) if len(raw) == _NUMBER.size else 0
