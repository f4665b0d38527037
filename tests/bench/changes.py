"""Detect rule changes in the kernel to the millisecond, without listing all rules."""

import ctypes
import os
import socket
import struct
import subprocess
import time
from collections.abc import Mapping
from typing import Protocol

from pykubeproxy.lab.network import Namespace

_NETLINK_NETFILTER, _NETLINK_ADD_MEMBERSHIP, _SOL_NETLINK = 12, 1, 270
_GROUP_NFTABLES = 7
_SO_RCVBUFFORCE = 33
# NFT_MSG_NEWGEN ends the notifications of each transaction.
_NEW_GENERATION = 10 << 8 | 15
_IPT_SO_GET_INFO = 64
_POLL_SECONDS = 0.001


class TimedOut(RuntimeError):
    """The rules did not change in time."""


class ChangeWatch(Protocol):
    """Waits until a chain of the IPv4 table nat has a given number of endpoints."""

    def arm(self) -> None: ...
    def wait(self, chain: str, endpoints: int, seconds: float) -> float: ...
    def close(self) -> None: ...


class NftWatch:
    """Uses nftables notifications, and lists the chain after each transaction."""

    def __init__(self, node: Namespace, environment: Mapping[str, str]) -> None:
        self._node, self._environment = node, environment
        with node.entered():
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
        self._socket.bind((0, 0))
        self._socket.setsockopt(_SOL_NETLINK, _NETLINK_ADD_MEMBERSHIP, _GROUP_NFTABLES)

    def arm(self) -> None:
        """Discard the notifications so far."""
        self._socket.setblocking(False)
        try:
            while True:
                self._socket.recv(1 << 18)
        except BlockingIOError:
            pass

    def wait(self, chain: str, endpoints: int, seconds: float) -> float:
        """Return the time.monotonic() of the transaction that made the change. Raise TimedOut."""
        deadline = time.monotonic() + seconds
        while True:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                message = self._socket.recv(1 << 18)
            except TimeoutError:
                raise TimedOut(f"{chain} did not change in {seconds:.0f} s") from None
            moment = time.monotonic()
            if _NEW_GENERATION in _types(message) and self._endpoints(chain) == endpoints:
                return moment

    def _endpoints(self, chain: str) -> int:
        return sum(" -j KUBE-SEP-" in rule for rule in rules(self._node, chain, self._environment))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class LegacyWatch:
    """Polls the size of the table, which each added or removed endpoint changes."""

    def __init__(self, node: Namespace) -> None:
        with node.entered():
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._before = 0

    def arm(self) -> None:
        """Store the current size."""
        self._before = self._rules()

    def wait(self, chain: str, endpoints: int, seconds: float) -> float:
        """Return the time.monotonic() of the change. Raise TimedOut."""
        deadline = time.monotonic() + seconds
        while self._rules() == self._before:
            if time.monotonic() > deadline:
                raise TimedOut(f"table nat did not change in {seconds:.0f} s")
            time.sleep(_POLL_SECONDS)
        return time.monotonic()

    def _rules(self) -> int:
        """Return the number of entries of table nat, in 50 µs at any size."""
        info = ctypes.create_string_buffer(b"nat", 84)
        length = ctypes.c_uint32(84)
        number = self._socket.fileno()
        if self._libc.getsockopt(number, socket.SOL_IP, _IPT_SO_GET_INFO, info, ctypes.byref(length)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        # After the name (32 bytes): a mask of hooks, their entries and underflows (5 each), then the number.
        return int(struct.unpack_from("I", info.raw, 32 + 4 * 11)[0])

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def watch(backend: str, node: Namespace, environment: Mapping[str, str]) -> ChangeWatch:
    """Return the watch for a backend."""
    return NftWatch(node, environment) if backend == "nft" else LegacyWatch(node)


def rules(node: Namespace, chain: str, environment: Mapping[str, str]) -> list[str]:
    """Return the rules of a chain of the IPv4 table nat; none if the chain does not exist."""
    with node.entered():
        command = ["iptables", "-t", "nat", "-S", chain]
        shown = subprocess.run(command, capture_output=True, text=True, env=dict(environment), timeout=60)
    return [line for line in shown.stdout.splitlines() if line.startswith("-A")]


def rewrite(node: Namespace, chain: str, environment: Mapping[str, str]) -> float:
    """Return the seconds of one iptables-restore that rewrites this chain unchanged."""
    text = "\n".join(["*nat", f":{chain} - [0:0]", *rules(node, chain, environment), "COMMIT", ""])
    with node.entered():
        started = time.monotonic()
        command = ["iptables-restore", "--noflush"]
        subprocess.run(command, input=text, text=True, check=True, env=dict(environment), timeout=60)
        return time.monotonic() - started


def _types(message: bytes) -> set[int]:
    """Return the types of the netlink messages in a datagram."""
    types, at = set(), 0
    while at + 16 <= len(message):
        length, kind = struct.unpack_from("IH", message, at)
        types.add(kind)
        at += max(length + 3 & ~3, 16)
    return types
