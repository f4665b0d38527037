"""Traces in large tables read only the chains on the packet's path."""

import time
from collections.abc import Iterator, Mapping

from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from tests.traces import trace_packet

SERVICES, ENDPOINTS = 5000, 10


def cluster_ip(number: int) -> str:
    return f"10.96.{number // 250}.{number % 250 + 1}"


def large() -> dict[ChainKey, tuple[str, ...]]:
    """Return services in a flat chain, each with its endpoints: 60,000 rules."""
    chains: dict[ChainKey, tuple[str, ...]] = {
        ChainKey("nat", "PREROUTING"): ("-j KUBE-SERVICES",),
        ChainKey("nat", "KUBE-SERVICES"): tuple(
            f"-d {cluster_ip(n)}/32 -p tcp -m tcp --dport 80 -j SVC-{n}" for n in range(SERVICES)
        ),
    }
    for n in range(SERVICES):
        chains[ChainKey("nat", f"SVC-{n}")] = tuple(
            f"-m statistic --mode random --probability {1 / (ENDPOINTS - i):.11f} "
            f"-j DNAT --to-destination 10.{100 + i}.{n // 250}.{n % 250 + 1}:8080"
            for i in range(ENDPOINTS)
        )
    return chains


class RecordingChains(Mapping[ChainKey, tuple[str, ...]]):
    """Chains that record which of them are read."""

    def __init__(self, chains: dict[ChainKey, tuple[str, ...]]) -> None:
        self._chains = chains
        self.read: list[ChainKey] = []

    def __getitem__(self, key: ChainKey) -> tuple[str, ...]:
        if key in self._chains:
            self.read.append(key)
        return self._chains[key]

    def __contains__(self, key: object) -> bool:
        return key in self._chains

    def __iter__(self) -> Iterator[ChainKey]:
        raise AssertionError("a trace must not list all chains")

    def __len__(self) -> int:
        return len(self._chains)


def test_trace_reads_only_chains_on_the_path() -> None:
    """The last of 5000 services takes at most a second of CPU time."""
    chains = RecordingChains(large())
    packet = Packet("tcp", "203.0.113.9", cluster_ip(SERVICES - 1), 80)
    started = time.process_time()
    trace = trace_packet(Ruleset(Family.IPV4, chains), packet, NodeNetwork())
    assert time.process_time() - started < 1
    assert all(abs(endpoint.probability - 1 / ENDPOINTS) < 1e-9 for endpoint in trace.endpoints)
    assert len(trace.endpoints) == ENDPOINTS
    assert len(chains.read) == len(set(chains.read)) == 3
