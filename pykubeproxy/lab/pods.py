"""Pods: one process in one namespace each, with the status a kubelet would report."""

import http.client
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from pykubeproxy.lab.api import POD_PORT
from pykubeproxy.lab.apiserver.write import now
from pykubeproxy.lab.network import Namespace, Site
from pykubeproxy.lab.prober import Prober, Target

WORKLOADS = Path(__file__).with_name("workloads.py")
TIMEOUT = 10.0


@dataclass(frozen=True)
class Status:
    """The status of a pod; `answering` is its readiness probe's result, `gates` are the closed readiness gates."""

    running: bool = True
    answering: bool = False
    terminating: bool = False
    gates: frozenset[str] = frozenset()

    @property
    def ready(self) -> bool:
        """The pod condition Ready: the readiness probe succeeds and all gates are open."""
        return self.running and self.answering and not self.gates

    def __str__(self) -> str:
        if not self.running:
            return "ended"
        text = "ready" if self.ready else "not ready"
        if self.gates:
            text += f", waiting for {', '.join(sorted(self.gates))}"
        return f"{text}, terminating" if self.terminating else text


@dataclass(eq=False)
class Pod:
    """A pod. Calls `changed`, from any thread, after each change of `status`."""

    name: str
    app: str
    site: Site
    addresses: tuple[str, str]
    namespace: Namespace
    interface: str
    log: Path
    changed: Callable[[], None]
    status: Status
    started: str = field(default_factory=now)  # a time of the API

    def start(self, command: list[str]) -> None:
        """Start the process; each "ready" or "unready" on its standard output is a change of readiness."""
        self.prober = Prober(self.namespace)
        self._published = self.status  # the last status for which `changed` has returned
        self._condition = threading.Condition()
        with self.log.open("wb") as errors:
            self._process = self.namespace.spawn(command, output=subprocess.PIPE, errors=errors)
        self._reader = threading.Thread(target=self._read, name=f"pod {self.name}", daemon=True)
        self._reader.start()

    def target(self, family: int = 4) -> Target:
        return Target(self.addresses[family == 6], POD_PORT)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                word = line.decode().strip()
                if word in ("ready", "unready"):
                    self._update(answering=word == "ready")
        self._process.wait()
        self._update(running=False)

    def _update(self, **changes: bool | frozenset[str]) -> None:
        with self._condition:
            status = self.status = replace(self.status, **changes)  # type: ignore[arg-type]
        self.changed()
        with self._condition:
            self._published = status
            self._condition.notify_all()

    def _await(self, condition: Callable[[Status], bool], state: str) -> None:
        with self._condition:
            if not self._condition.wait_for(lambda: condition(self._published), TIMEOUT):
                raise TimeoutError(f"pod {self.name} is not {state} after {TIMEOUT:.0f} s; see {self.log}")

    def wait_answering(self) -> None:
        """Wait until the readiness probe succeeds; raises TimeoutError, also if the process ends."""
        self._await(lambda status: status.answering or not status.running, "answering")
        if not self._published.running:
            raise TimeoutError(f"pod {self.name} ended before it answered; see {self.log}")

    def set_answering(self, answering: bool) -> None:
        """Make the readiness probe succeed or fail; the pod answers in both cases."""
        with self.namespace.entered():
            connection = http.client.HTTPConnection("127.0.0.1", POD_PORT, timeout=5)
            connection.request("POST", "/ready" if answering else "/unready")
            connection.getresponse().read()
            connection.close()
        self._await(lambda status: status.answering == answering, "ready" if answering else "unready")

    def open_gate(self, gate: str) -> None:
        self._update(gates=self.status.gates - {gate})

    def mark_terminating(self) -> None:
        """Mark the pod as deleted, without a signal to its process."""
        self._update(terminating=True)

    def terminate(self) -> None:
        """Send SIGTERM; the process ends after its linger time."""
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait_ended(self) -> None:
        """Wait until the process has ended and `changed` has returned; raises TimeoutError."""
        self._reader.join(TIMEOUT)
        if self._reader.is_alive():
            raise TimeoutError(f"pod {self.name} has not ended after {TIMEOUT:.0f} s")


def workload(name: str, *options: str) -> list[str]:
    """Return the command of one of the programs in workloads.py."""
    # -I -S skip the environment and site-packages, which halves the start time.
    return [sys.executable, "-I", "-S", str(WORKLOADS), name, "--port", str(POD_PORT), *options]
