"""An agent process on real tables, whose rules, memory and restores are judged."""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pykubeproxy.kernel import Backend, Runner, Tables, open_iptables
from pykubeproxy.lab.apiserver import Store
from pykubeproxy.objects import Family
from tests.fakes.cluster import node, server
from tests.fakes.process import inside_a_namespace, running
from tests.fuzz.hostile_steps import NODE_IP
from tests.fuzz.judge import Claim, problems

# Limits for objects of scale LARGE: seconds until the victim is served and of one restore, and the most memory ever
# resident (VmHWM) in kB.
_SERVED_SECONDS, _RESTORE_SECONDS, _MEMORY = 60.0, 20.0, 300_000
_RESTORE = re.compile(r"restore_seconds=([\d.]+)")


class RealAgent:
    """An agent in a network namespace that follows `store`."""

    def __init__(self, backend: Backend, folder: Path) -> None:
        self.store = Store()
        self._backend = backend
        self._log = folder / "agent.log"
        self._environment = {"XTABLES_LOCKFILE": str(folder / "lock")}
        self._pid = 0

    @contextmanager
    def running(self) -> Iterator["RealAgent"]:
        """Run it in a network namespace, which the caller enters too."""
        flags = (
            "--hostname-override=node1",
            f"--iptables-backend={self._backend.value}",
            "--cluster-cidr=10.244.0.0/16,fd00:10:244::/56",
            "-v=2",
        )
        addresses = [{"type": "InternalIP", "address": it} for it in NODE_IP.values()]
        with inside_a_namespace(), server(store=self.store) as api:
            self.store.create(node("node1", "") | {"status": {"addresses": addresses}})
            with running(self._log, *flags, "--master", api.url, environment=self._environment) as process:
                self._pid = process.pid
                yield self

    def assert_served(self, ready: Mapping[Family, int], claimed: frozenset[Claim]) -> None:
        """Wait until packets to the victim reach its endpoints in both families; fail after a time limit."""
        deadline = time.monotonic() + _SERVED_SECONDS
        for family in Family:
            tables = open_iptables(self._backend, family, Runner(environment=self._environment))
            while found := self._problems(tables, ready[family], claimed):
                assert time.monotonic() < deadline, "\n".join(found)
                time.sleep(0.2)

    def assert_modest(self) -> None:
        """Fail if the agent has taken too much memory, if a restore took too long, or if a tree was rejected."""
        log = self._log.read_text()
        slowest = max(map(float, _RESTORE.findall(log)))
        assert slowest < _RESTORE_SECONDS, f"a restore took {slowest} s"
        status = Path(f"/proc/{self._pid}/status").read_text()
        most = int(status.partition("VmHWM:")[2].split()[0])
        assert most < _MEMORY, f"the agent has taken {most} kB"
        assert "sync failed" not in log
        assert "dispatch tree rejected" not in log

    def _problems(self, tables: Tables, ready: int, claimed: frozenset[Claim]) -> list[str]:
        try:
            return list(problems(tables.save(), ready, claimed))
        except KeyError as missing:
            return [f"chain {missing} is missing"]
