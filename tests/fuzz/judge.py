"""Judge the rules of the victim by walking packets through them, and an agent process by what a victim feels."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pykubeproxy.kernel import Backend, KernelError, Runner, live_ruleset, open_iptables
from pykubeproxy.lab.apiserver import Store
from pykubeproxy.objects import Family, address_and_port, check
from pykubeproxy.rules.ruleset import Ruleset
from tests.fakes.cluster import node, server
from tests.fakes.process import HEALTH, answers, inside_a_namespace, running
from tests.fuzz.hostile_steps import BALANCER_IP, CLUSTER_IP, EXTERNAL_IP, NODE_IP, VICTIM, VICTIM_PORTS, pod
from tests.packet_model import Packet, Walker

CLIENT = {Family.IPV4: "203.0.113.9", Family.IPV6: "2001:db8:9::9"}  # in the victim's source ranges
STRANGER = {Family.IPV4: "198.18.0.9", Family.IPV6: "2001:db8:77::9"}  # not in them
POD = {Family.IPV4: "10.244.1.77", Family.IPV6: "fd00:10:244:1::77"}
# The most rules of table nat that a packet to the victim may visit before the victim's own chains.
MOST_VISITED = 1700

Claim = tuple[str, str, int]  # address, protocol, port


def claims(services: Iterable[dict[str, Any]]) -> frozenset[Claim]:
    """Return what other Services claim by external IPs and load balancer IPs: there, either may get the packets."""
    found: set[Claim] = set()
    for service in services:
        meta, spec = service["metadata"], service["spec"]
        if (meta["namespace"], meta["name"]) == VICTIM:
            continue
        ingress = service.get("status", {}).get("loadBalancer", {}).get("ingress") or []
        for address in (*(spec.get("externalIPs") or ()), *(item["ip"] for item in ingress)):
            for port in spec.get("ports") or ():
                found.add((check.address(address, ""), port.get("protocol", "TCP"), port["port"]))
    return frozenset(found)


class Destination(NamedTuple):
    """An address and port of the victim, and the port of its endpoints."""

    kind: str
    address: str
    port: int
    protocol: str
    target: int


def destinations(family: Family) -> Iterator[Destination]:
    """Yield all addresses and ports at which the victim is served."""
    for port, protocol, node_port, target in VICTIM_PORTS.values():
        yield Destination("cluster IP", CLUSTER_IP[family], port, protocol, target)
        yield Destination("external IP", EXTERNAL_IP[family], port, protocol, target)
        yield Destination("load balancer IP", BALANCER_IP[family], port, protocol, target)
        yield Destination("node port", NODE_IP[family], node_port, protocol, target)


def problems(ruleset: Ruleset, ready: int, claimed: frozenset[Claim]) -> Iterator[str]:
    """Yield what is wrong for packets to the victim, whose first `ready` pods are its endpoints."""
    walker, family = Walker(ruleset), ruleset.family
    for to in destinations(family):
        # An external IP must not take over a cluster IP that has endpoints; all else may be claimed.
        if (to.address, to.protocol, to.port) in claimed and not (to.kind == "cluster IP" and ready):
            continue
        for source in (CLIENT[family], STRANGER[family], POD[family]):
            for problem in _problems(walker, to, source, ready, claimed):
                yield f"{to} from {source}: {problem}"


def _problems(
    walker: Walker, to: Destination, source: str, ready: int, claimed: frozenset[Claim]
) -> Iterator[str]:
    family = Family.IPV6 if ":" in source else Family.IPV4
    local = to.kind == "node port"
    packet = Packet(
        source, to.address, to.protocol.lower(), to.port, local_destination=local, states=frozenset({"NEW"})
    )
    allowed = to.kind != "load balancer IP" or source == CLIENT[family]
    pods = [pod(family, n) for n in range(1, ready + 1)] if allowed else []
    expected = {f"to {address_and_port(address, to.target)}": 1 / ready for address in pods}
    outcomes = walker.walk(packet, "nat", "PREROUTING")
    if walker.visited > MOST_VISITED:
        yield f"the packet visits {walker.visited} rules"
    found = {outcome.verdict: share for outcome, share in outcomes.items() if outcome.verdict}
    if found.keys() != expected.keys() or any(abs(found[item] - expected[item]) > 1e-6 for item in found):
        yield f"{found} instead of {expected}"
    masquerades = to.kind != "cluster IP" or source != POD[family]
    if found and any(bool(outcome.mark) is not masquerades for outcome in outcomes):
        yield f"masquerading is not {masquerades}"
    if not pods:
        verdicts = {item.verdict for item in walker.walk(packet, "filter", "INPUT" if local else "FORWARD")}
        if verdicts != {"DROP" if ready else "REJECT"}:
            yield f"without endpoints, filter says {verdicts}"
    for address in pods:
        if (address, to.protocol, to.target) in claimed:
            continue  # A Service with a pod's address as its external IP claims the pod itself.
        onward = Packet(source, address, to.protocol.lower(), to.target, states=frozenset({"NEW", "DNAT"}))
        verdicts = {item.verdict for item in walker.walk(onward, "filter", "FORWARD")}
        if not verdicts <= {"", "ACCEPT"}:
            yield f"filter says {verdicts} to {address}"


# Limits: seconds until the victim's change is in the kernel; kB of memory and lines of warnings and requests about events a
# second beyond an undisturbed agent, and seconds of one restore. Each commit to a legacy table replaces the whole table. So
# there, a change may take a second between two syncs, its own commit, and that of a turn which has begun before.
_SECONDS = {Backend.NFT: 3.0, Backend.LEGACY: 6.0}
_MEMORY, _A_SECOND, _RESTORE_SECONDS = 100_000, 2.0, 20.0
# From here on, a change takes so long that it need not end.
_MOST_SECONDS = 60.0
_RESTORE = re.compile(r"restore_seconds=([\d.]+)")
_ALARM = re.compile(r"\[(?:warning|error|critical)")


class RealAgent:
    """An agent in a network namespace that follows `store`."""

    def __init__(self, backend: Backend, folder: Path) -> None:
        self.store = Store()
        self._backend = backend
        self._log = folder / "agent.log"
        self._environment = {"XTABLES_LOCKFILE": str(folder / "lock")}
        self._pid = 0
        self._memory = self._begun = 0.0

    @contextmanager
    def running(self) -> Iterator["RealAgent"]:
        """Enter a network namespace, and serve the API there; agents run in it by `started`."""
        addresses = [{"type": "InternalIP", "address": item} for item in NODE_IP.values()]
        with inside_a_namespace(), server(store=self.store) as self._api:
            self.store.create(node("node1", "") | {"status": {"addresses": addresses}})
            yield self

    @contextmanager
    def started(self) -> Iterator[None]:
        """Run an agent, anew each time."""
        flags = (
            "--hostname-override=node1",
            f"--iptables-backend={self._backend.value}",
            "--cluster-cidr=10.244.0.0/16,fd00:10:244::/56",
            "-v=2",
        )
        with running(self._log, *flags, "--master", self._api.url, environment=self._environment) as process:
            self._pid = process.pid
            yield

    def delay(
        self, change: Callable[[], None], ready: Mapping[Family, int], claimed: frozenset[Claim]
    ) -> float:
        """Change the victim's endpoints; return the seconds until packets reach them in both families.

        That is when the first reading begins that finds no problem: how long a reading takes does not count.
        """
        change()
        begun = time.monotonic()
        while True:
            at = time.monotonic() - begun
            found = [item for family in Family for item in self._problems(family, ready[family], claimed)]
            if not found:
                return at
            assert at < _MOST_SECONDS, f"the victim waits for {at:.0f} s:\n" + "\n".join(found)
            time.sleep(0.05)

    def assert_served(self, ready: Mapping[Family, int], claimed: frozenset[Claim]) -> None:
        """Wait until packets to the victim reach its endpoints in both families; fail after a time limit."""
        self.delay(lambda: None, ready, claimed)

    def note_undisturbed(self) -> None:
        """Record memory and alarms without a hostile tenant."""
        self._memory = self._most_memory()
        self._alarms, self._events = self._counts()
        self._begun = time.monotonic()
        self.assert_healthy()

    def disturbed(self, delay: float) -> None:
        """Fail if a change took too long beside a hostile tenant, or if the agent is not healthy."""
        most = _SECONDS[self._backend]
        assert delay <= most, f"the victim waited for {delay:.1f} s, at most {most:.1f} s are allowed"
        self.assert_healthy()

    def assert_modest(self) -> None:
        """Fail for too much memory, a long restore, too many alarms or events, a failed sync or a rejected tree."""
        log = self._log.read_text()
        slowest = max(map(float, _RESTORE.findall(log)))
        assert slowest < _RESTORE_SECONDS, f"a restore took {slowest} s"
        more = self._most_memory() - self._memory
        assert more <= _MEMORY, f"the agent has taken {more:.0f} kB more than undisturbed"
        seconds = time.monotonic() - self._begun + 10
        for what, now, before in zip(
            ("warnings", "requests about events"), self._counts(), (self._alarms, self._events), strict=True
        ):
            assert now - before <= _A_SECOND * seconds, f"{now - before} {what} in {seconds:.0f} s"
        assert "sync failed" not in log
        assert "dispatch tree rejected" not in log

    def assert_healthy(self) -> None:
        """Fail if a health page says that the agent is not."""
        for path in ("/healthz", "/readyz", "/livez"):
            assert answers(HEALTH, path, 200), f"{path} is not 200"

    def _counts(self) -> tuple[int, int]:
        """Return the warnings in the log, and the requests about events."""
        requests = (self._api.requests.count(resource=item) for item in ("events", "events.events.k8s.io"))
        return len(_ALARM.findall(self._log.read_text())), sum(requests)

    def _most_memory(self) -> float:
        """Return the most memory ever resident, in kB."""
        status = Path(f"/proc/{self._pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0])

    def _problems(self, family: Family, ready: int, claimed: frozenset[Claim]) -> list[str]:
        tables = open_iptables(self._backend, family, Runner(environment=self._environment))
        try:
            return list(problems(live_ruleset(tables)[0], ready, claimed))
        except KeyError as missing:
            return [f"chain {missing} is missing"]
        except KernelError as error:  # iptables-nft cannot read a chain that is deleted meanwhile
            return [str(error)]
