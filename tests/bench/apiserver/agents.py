"""Agents without rules: the watches of many agents in one process, which decode what they receive.

`python -m tests.bench.apiserver.agents KUBECONFIG NUMBER` runs them as a process. It prints a line when all have listed.
Then each line of input is a number of changes to wait for; it answers when all agents have received them.
"""

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import structlog

from pykubeproxy.objects import Event, Kind, Listed, Updated
from pykubeproxy.sources.api import api_watches
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.watch import Watch
from tests.bench import workload

_PATIENCE = 120.0


class Agent:
    """The watches of one agent. They never end: its process must."""

    def __init__(self, kubeconfig: Path) -> None:
        self._changed = threading.Condition()
        self._listed: set[Kind] = set()
        self._updated = 0
        for watch in api_watches(Client(str(kubeconfig)), workload.NODE):
            threading.Thread(target=self._run, args=(watch,), name=watch.name, daemon=True).start()

    def wait_listed(self) -> None:
        """Wait for the first lists. Raises TimeoutError."""
        self._wait(lambda: len(self._listed) == len(Kind))

    def wait_updated(self, number: int) -> None:
        """Wait until this many changes arrived since the start. Raises TimeoutError."""
        self._wait(lambda: self._updated >= number)

    def _run(self, watch: Watch) -> None:
        watch.run(self._emit)

    def _emit(self, event: Event) -> None:
        with self._changed:
            match event:
                case Listed():
                    self._listed.add(event.kind)
                case Updated():
                    self._updated += 1
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, timeout=_PATIENCE):
                raise TimeoutError(
                    f"lists of {sorted(kind.value for kind in self._listed)}, {self._updated} changes"
                )


def main(kubeconfig: str, number: str) -> None:
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    agents = []
    for _ in range(int(number)):
        agents.append(Agent(Path(kubeconfig)))
        # One after the other: the lab's server serves lists of many agents at once too slowly.
        agents[-1].wait_listed()
    print("listed", flush=True)
    for line in sys.stdin:
        for agent in agents:
            agent.wait_updated(int(line))
        print("updated", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
