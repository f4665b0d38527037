"""Pods: a process in a namespace each, and what a kubelet would know of them."""

import http.client
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from pykubeproxy.lab.namespaces import Namespace
from pykubeproxy.lab.prober import Prober, Target

PORT = 8080
SERVER = Path(__file__).with_name("podserver.py")
PATIENCE = 10.0


@dataclass(frozen=True)
class Status:
    """How a pod stands; `answering` is the container's own word, `gates` those still closed."""

    running: bool = True
    answering: bool = False
    terminating: bool = False
    gates: frozenset[str] = frozenset()

    @property
    def ready(self) -> bool:
        """The pod condition Ready: the container says so and no readiness gate is closed."""
        return self.running and self.answering and not self.gates

    def describe(self) -> str:
        """In a few words."""
        if not self.running:
            return "ended"
        words = "ready" if self.ready else "not ready"
        if self.gates:
            words += f", waiting for {', '.join(sorted(self.gates))}"
        return f"{words}, terminating" if self.terminating else words


@dataclass(frozen=True)
class Identity:
    """What of a pod never changes."""

    name: str
    app: str
    node: str
    zone: str
    addresses: tuple[str, str]


class Pod:
    """A running pod. `changed` is called, from any thread, after each change of `status`."""

    def __init__(
        self,
        identity: Identity,
        namespace: Namespace,
        interface: str,
        *,
        command: list[str],
        log: Path,
        gates: frozenset[str],
        changed: Callable[[], None],
    ) -> None:
        self.identity = identity
        self.namespace = namespace
        self.interface = interface
        self.log = log
        self.status = self._known = Status(gates=gates)  # the second: once `changed` has returned
        self._changed = changed
        self._condition = threading.Condition()
        with log.open("wb") as errors:
            self._process = namespace.spawn(command, output=subprocess.PIPE, errors=errors)
        assert self._process.stdout is not None
        self._listener = threading.Thread(
            target=self._listen, args=(self._process.stdout,), name=f"pod {identity.name}", daemon=True
        )
        self._listener.start()

    @property
    def name(self) -> str:
        """Its name, which it answers with."""
        return self.identity.name

    @property
    def prober(self) -> Prober:
        """Connections from inside this pod."""
        return Prober(self.namespace)

    def target(self, family: int = 4) -> Target:
        """The pod itself, without any Service."""
        return Target(self.identity.addresses[family == 6], PORT)

    def _listen(self, lines: IO[bytes]) -> None:
        with lines:
            for line in lines:
                word = line.decode().strip()
                if word in ("ready", "unready"):
                    self._become(answering=word == "ready")
        self._process.wait()
        self._become(running=False)

    def _become(self, **changes: bool | frozenset[str]) -> None:
        with self._condition:
            now = self.status = replace(self.status, **changes)  # type: ignore[arg-type]
        self._changed()
        with self._condition:
            self._known = now
            self._condition.notify_all()

    def _await(self, condition: Callable[[Status], bool], wanted: str, patience: float = PATIENCE) -> None:
        with self._condition:
            if not self._condition.wait_for(lambda: condition(self._known), patience):
                raise TimeoutError(f"pod {self.name} is not {wanted} after {patience:.0f} s; see {self.log}")

    def wait_answering(self) -> None:
        """Wait until the container says that it is ready; raises TimeoutError, also when it ended."""
        self._await(lambda status: status.answering or not status.running, "answering")
        if not self._known.running:
            raise TimeoutError(f"pod {self.name} ended before it answered; see {self.log}")

    def set_answering(self, answering: bool) -> None:
        """Make the container pass its readiness probe or fail it, while it answers all the same."""
        with self.namespace.entered():
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
            connection.request("POST", "/ready" if answering else "/unready")
            connection.getresponse().read()
            connection.close()
        self._await(lambda status: status.answering == answering, "ready" if answering else "unready")

    def open_gate(self, gate: str) -> None:
        """Whoever the readiness gate belongs to is content."""
        self._become(gates=self.status.gates - {gate})

    def mark_terminating(self) -> None:
        """The pod is deleted, its process not yet told."""
        self._become(terminating=True)

    def terminate(self) -> None:
        """Tell the process to end (SIGTERM), which it does after its linger time."""
        self._process.terminate()

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def wait_gone(self) -> None:
        """Wait until the process has ended and everybody knows."""
        self._listener.join(PATIENCE)
        if self._listener.is_alive():
            raise TimeoutError(f"pod {self.name} has not ended after {PATIENCE:.0f} s")


def server_command(name: str, linger: float) -> list[str]:
    """The command of an ordinary pod, which serves `linger` seconds on after it was told to end."""
    # -I -S: neither the environment nor site-packages; the interpreter starts in half the time.
    return [sys.executable, "-I", "-S", str(SERVER), name, "--port", str(PORT), "--linger", str(linger)]
