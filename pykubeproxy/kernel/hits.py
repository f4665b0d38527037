"""Have the kernel trace which rules of nftables the first packets of some flows meet, with those of iptables-nft.

A table that belongs to a process of ours marks exactly these packets. The kernel removes the table when that process
ends, however it ends. Rules of the legacy backend cannot be traced. Works on the network namespace of the calling thread.
"""

import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pykubeproxy.kernel import nftables
from pykubeproxy.kernel.conntrack import FirstPacket
from pykubeproxy.kernel.errors import KernelError
from pykubeproxy.kernel.runner import killed_with_parent
from pykubeproxy.rules.ruleset import IPTABLES_TABLES

_TABLE = "inet pykubeproxy-trace-{}"
# Before all other rules, connection tracking too; of TCP only the first packets.
_CHAIN = "chain {hook} {{ type filter hook {hook} priority -500; {match} meta nftrace set 1; }};"
_MATCH = "{ip} saddr {source} {ip} daddr {to} {protocol} sport {{ {ports} }} {protocol} dport {port}"
_FIRST_OF_TCP = " tcp flags & (syn | ack) == syn"
_PROTOCOLS = {socket.IPPROTO_TCP: "tcp", socket.IPPROTO_UDP: "udp", 132: "sctp"}
_EVENT = re.compile(
    r"trace id (?P<id>\w+) (?P<family>\w+) (?P<table>\S+) (?P<chain>\S+)"
    r" (?:packet: .*? sport (?P<port>\d+) .*|(?P<rule>.*?) \(verdict (?P<verdict>[^)]*)\)|(?P<policy>policy \w+) ?)"
)
_COUNTS = re.compile(r"(counter) packets \d+ bytes \d+")
_START_SECONDS, _LAST_EVENT_SECONDS = 3.0, 0.1


class RuleHit(msgspec.Struct, frozen=True, rename="camel"):
    """A rule that the first packet of a flow met.

    - `source_port`: of the packet
    - `table`: "nat" of iptables, or one of nftables with its family
    - `rule`: its text, as nft prints it
    - `verdict`: what the rule decided, such as "accept", "drop" or "jump KUBE-SERVICES"
    """

    source_port: int
    table: str
    chain: str
    rule: str
    verdict: str


class HitTrace:
    """A trace of flows of one family and destination, from its construction to `end`. Raises KernelError."""

    def __init__(self, flows: Sequence[FirstPacket]) -> None:
        self._table = _TABLE.format(os.getpid())
        self._events = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes this
        wrapper = killed_with_parent()
        pipe = subprocess.PIPE
        try:
            self._monitor = subprocess.Popen(
                (*wrapper, "nft", "monitor", "trace"),
                stdout=self._events,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
            self._owner = subprocess.Popen(
                (*wrapper, "nft", "-i"), stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, process_group=0
            )
        except OSError as error:
            raise KernelError(f"cannot trace rules: nft: {error.strerror}") from None
        assert self._owner.stdin is not None
        self._owner.stdin.write(f"{_table_text(self._table, flows)}\n".encode())
        self._owner.stdin.flush()
        until = time.monotonic() + _START_SECONDS
        while not (self._table in nftables.native_tables() and _listens(self._monitor.pid)):
            if time.monotonic() > until:
                self.end()
                raise KernelError("cannot trace rules: nft sets up no trace; it needs nft 1.0 and Linux 5.12")
            time.sleep(0.01)

    def end(self) -> tuple[RuleHit, ...]:
        """End the trace, and return the rules that the first packets met, in order."""
        time.sleep(_LAST_EVENT_SECONDS)
        for process in (self._owner, self._monitor):
            process.kill()  # it may have inherited a mask that blocks other signals
        self._owner.communicate()
        self._monitor.wait()
        with self._events as events:
            events.seek(0)
            return parse_hits(events.read().decode(errors="replace"), self._table)


def _listens(pid: int) -> bool:
    """Return whether a process gets events of netfilter over netlink."""
    lines = (line.split() for line in Path("/proc/thread-self/net/netlink").read_text().splitlines()[1:])
    return any(words[1:3] == ["12", str(pid)] and int(words[3], 16) for words in lines)


def _table_text(table: str, flows: Sequence[FirstPacket]) -> str:
    first = flows[0]
    protocol = _PROTOCOLS[first.protocol]
    match = _MATCH.format(
        ip="ip6" if ":" in first.source else "ip",
        source=first.source,
        to=first.destination,
        protocol=protocol,
        ports=", ".join(str(flow.source_port) for flow in flows),
        port=first.port,
    )
    match += _FIRST_OF_TCP if protocol == "tcp" else ""
    chains = " ".join(_CHAIN.format(hook=hook, match=match) for hook in ("prerouting", "output"))
    return f"table {table} {{ flags owner; {chains} }}"


def parse_hits(text: str, own: str) -> tuple[RuleHit, ...]:
    """Read what `nft monitor trace` prints; `own` is the table that marks the packets."""
    # The kernel gives an id to several packets, one after the other.
    ports: dict[str, int] = {}
    hits = []
    for line in text.splitlines():
        event = _EVENT.match(line)
        if event is None:
            continue
        if event["port"]:
            ports[event["id"]] = int(event["port"])
            continue
        family, table = event["family"], event["table"]
        name = f"{family} {table}"
        if event["id"] not in ports or name == own:
            continue
        of_iptables = family in ("ip", "ip6") and table in IPTABLES_TABLES
        rule = event["policy"] or " ".join(_COUNTS.sub(r"\1", event["rule"].removeprefix("rule ")).split())
        verdict = event["verdict"] or rule.removeprefix("policy ")
        hits.append(
            RuleHit(ports[event["id"]], table if of_iptables else name, event["chain"], rule, verdict)
        )
    return tuple(dict.fromkeys(hits))
