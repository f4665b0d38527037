"""The node under test in a soak, with its expected state."""

import fcntl
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import urllib3

from pykubeproxy.kernel import Iptables
from pykubeproxy.lab.agents import node_environment
from pykubeproxy.lab.api import Object
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey
from tests.cases import comparable
from tests.fakes.faulty_apiserver import Order
from tests.fakes.stage import Stage, dispatch_settings, tables

CROWD = 150
_MARKER = CROWD  # a Service created and deleted to see that all earlier changes have arrived
# Seconds; longer than the agents wait between two syncs.
LONGEST_PAUSE = 0.8

Interval = tuple[float, float]
Rules = dict[ChainKey, list[str]]


def difference(before: Rules, after: Rules) -> str:
    """Describe the differences, chain by chain."""
    keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    return "; ".join(f"{key.table} {key.chain}: {before.get(key)} is {after.get(key)}" for key in keys)


class SoakNode:
    """Node1 of a lab with its agent, tables and Services; node2's agent is never stopped."""

    def __init__(self, lab: Lab) -> None:
        self.stage = Stage(lab)
        self.settings: Object = dispatch_settings("flat")
        self.numbers = range(CROWD)
        self.present: set[int] = set()
        self.excused: list[Interval] = []
        self.repairs: list[float] = []
        self.tables: dict[Family, Iptables] = {it: tables(lab, "node1", it) for it in Family}
        self._lock = Path(node_environment(lab.logs, "node1")["XTABLES_LOCKFILE"])
        lab.agents["node2"].start()
        self.start()

    def start(self) -> None:
        """Start or restart node1's agent."""
        self.stage.start(self.settings)

    def create(self, numbers: Sequence[int]) -> None:
        """Create these Services."""
        for number in numbers:
            self.stage.crowd.create(range(number, number + 1))
        self.present.update(numbers)

    def delete(self, numbers: Sequence[int]) -> None:
        """Delete these Services."""
        for number in numbers:
            self.stage.crowd.delete(range(number, number + 1))
        self.present.difference_update(numbers)

    def order(self, order: Order) -> None:
        """Inject a fault into the API server; `drop` closes the connection of this request, too."""
        with suppress(urllib3.exceptions.ProtocolError):
            self.stage.lab.api.call("POST", "/_lab/faults", msgspec.to_builtins(order))

    def quiet(self) -> None:
        """End all faults and wait until the tables show all changes, including a last marker Service."""
        self.order(Order("clear"))
        self.until(self.stage.is_synced, "the rules are in place")
        self.create([_MARKER])
        self.until(lambda: self._served() == self.present, "exactly the existing Services are served")
        self.delete([_MARKER])
        self.until(lambda: self._served() == self.present, "deleted Services are no longer served")
        self.until(self._is_still, "the agent stops writing")

    def _served(self) -> set[int]:
        return self.stage.served([*self.numbers, _MARKER])

    def _is_still(self) -> bool:
        before = [self.rules(family) for family in Family]
        time.sleep(LONGEST_PAUSE)
        return before == [self.rules(family) for family in Family]

    def rules(self, family: Family) -> Rules:
        """Return the live rules of a family in comparable form."""
        return comparable(self.tables[family].save(["filter", "nat"]))

    def comes_back(self, family: Family, before: Rules) -> None:
        """Wait until the rules are as before. Raise TimeoutError with the differences."""
        try:
            self.until(lambda: self.rules(family) == before, "the rules are back")
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {difference(before, self.rules(family))}") from None

    def iptables(self, family: Family, *arguments: str) -> None:
        """Run an external iptables command on node1."""
        program = "iptables" if family is Family.IPV4 else "ip6tables"
        command = [f"{program}-{self.stage.lab.backend}", "-w", *arguments]
        environment = node_environment(self.stage.lab.logs, "node1")
        with self.stage.lab.nodes["node1"].namespace.entered():
            subprocess.run(command, check=True, env=environment)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the legacy tables."""
        with self._lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until the condition holds. Raise TimeoutError after a minute."""
        self.stage.lab.until(condition, what)

    def memory(self) -> dict[str, float]:
        """Return the resident memory of each agent in MB."""
        found = {}
        for name, agent in self.stage.lab.agents.items():
            if agent.pid:
                status = Path(f"/proc/{agent.pid}/status").read_text()
                found[name] = int(status.partition("VmRSS:")[2].split()[0]) / 1024
        return found
