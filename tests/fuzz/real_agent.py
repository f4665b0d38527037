"""An agent process on real tables: what a victim feels of it, and its memory, log, events and health."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pykubeproxy.kernel import Backend, KernelError, Runner, Tables, live_ruleset, open_iptables
from pykubeproxy.lab.apiserver import Store
from pykubeproxy.objects import Family
from tests.fakes.cluster import node, server
from tests.fakes.process import HEALTH, answers, inside_a_namespace, running
from tests.fuzz.hostile_steps import NODE_IP
from tests.fuzz.judge import Claim, problems

# Limits: seconds until the victim's change is in the kernel on nft, how many times as long as undisturbed on legacy, kB
# of memory and lines of warnings and requests about events a second beyond an undisturbed agent, and of one restore.
_SECONDS_NFT, _TIMES_LEGACY, _MEMORY, _A_SECOND, _RESTORE_SECONDS = 3.0, 3.0, 100_000, 2.0, 20.0
# From here on, a change takes so long that it need not end.
_MOST_SECONDS = 60.0
# A change takes at least so long on legacy for the comparison: the agent looks for drift in between.
_LEAST_UNDISTURBED = 0.5
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
        self._undisturbed = self._memory = 0.0
        self._begun = 0.0
        self._delays: list[float] = []

    @contextmanager
    def running(self) -> Iterator["RealAgent"]:
        """Enter a network namespace, and serve the API there; agents run in it by `started`."""
        addresses = [{"type": "InternalIP", "address": it} for it in NODE_IP.values()]
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
            found = [it for family in Family for it in self._problems(family, ready[family], claimed)]
            if not found:
                return at
            assert at < _MOST_SECONDS, f"the victim waits for {at:.0f} s:\n" + "\n".join(found)
            time.sleep(0.05)

    def assert_served(self, ready: Mapping[Family, int], claimed: frozenset[Claim]) -> None:
        """Wait until packets to the victim reach its endpoints in both families; fail after a time limit."""
        self.delay(lambda: None, ready, claimed)

    def undisturbed(self, delays: list[float]) -> None:
        """Record the time of changes and the memory without a hostile tenant."""
        self._undisturbed = max(*delays, _LEAST_UNDISTURBED)
        self._memory = self._most_memory()
        self._alarms, self._events = self._counts()
        self._begun = time.monotonic()
        self.assert_healthy()

    def disturbed(self, delay: float) -> None:
        """Fail if a change took too long beside a hostile tenant, or if the agent is not healthy."""
        most = _SECONDS_NFT if self._backend is Backend.NFT else _TIMES_LEGACY * self._undisturbed
        self._delays.append(delay)
        assert delay <= most, f"the victim waited for {delay:.1f} s, undisturbed {self._undisturbed:.1f} s"
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
        requests = (self._api.requests.count(resource=it) for it in ("events", "events.events.k8s.io"))
        return len(_ALARM.findall(self._log.read_text())), sum(requests)

    def _most_memory(self) -> float:
        """Return the most memory ever resident, in kB."""
        status = Path(f"/proc/{self._pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0])

    def _problems(self, family: Family, ready: int, claimed: frozenset[Claim]) -> list[str]:
        tables: Tables = open_iptables(self._backend, family, Runner(environment=self._environment))
        try:
            return list(problems(live_ruleset(tables)[0], ready, claimed))
        except KeyError as missing:
            return [f"chain {missing} is missing"]
        except KernelError as error:  # iptables-nft cannot read a chain that is deleted meanwhile
            return [str(error)]
