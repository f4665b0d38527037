"""Connections that go on while things happen: long-lived ones, and new ones without end; every failure is kept."""

import itertools
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pykubeproxy.lab.prober import Target

ECHO = Path(__file__).with_name("echo.py")
TIMEOUT = 3.0  # seconds without an answer are a failure
SLOW = 0.9  # whoever waits that long has lost a packet: it is sent again after a second

Enter = Callable[[], AbstractContextManager[None]]


def echo_command(name: str, *addresses: str) -> list[str]:
    """The command of a pod that these connections can be held with."""
    return [sys.executable, "-I", "-S", str(ECHO), name, *(addresses or ("0.0.0.0", "::"))]


class Failure(NamedTuple):
    """A connection that failed: when it was begun, or last answered, when that was noticed, and how."""

    begun: float
    noticed: float
    how: str


@dataclass
class Seen:
    """What one way of connecting has seen so far: answers by pod, failures, and answers that took long.

    `slowest` is in seconds.
    """

    pods: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    slow: list[Failure] = field(default_factory=list)
    slowest: float = 0.0

    def __str__(self) -> str:
        failed = Counter(it.how for it in self.failures)
        how = f" ({', '.join(f'{how} {count}' for how, count in failed.items())})" if failed else ""
        return f"{self.pods.total()} answers, {len(self.failures)} failed{how}, slowest {self.slowest:.2f} s"


class Way(NamedTuple):
    """How to connect: from where, to what; `affine` if it must always lead to the same pod."""

    name: str
    target: Target
    enter: Enter = nullcontext
    affine: bool = False


class Traffic:
    """For as long as the context lasts: on each way one connection that is held and a stream of new ones."""

    def __init__(self, ways: Iterable[Way], pause: float = 0.02) -> None:
        self.seen: dict[str, Seen] = {}
        self._pause = pause
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        for way in ways:
            for kind, run in (("held", self._hold), ("new", self._renew)):
                seen = self.seen[f"{way.name}, {kind}"] = Seen()
                thread = threading.Thread(target=self._run, args=(run, way, seen), daemon=True)
                self._threads.append(thread)

    def __enter__(self) -> "Traffic":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def failures(self) -> dict[str, list[Failure]]:
        """The failures so far, by way; a way without any is not in it."""
        return {name: list(seen.failures) for name, seen in self.seen.items() if seen.failures}

    def total(self) -> int:
        """All answers so far."""
        return sum(seen.pods.total() for seen in self.seen.values())

    def __str__(self) -> str:
        return "\n".join(f"  {name}: {seen}" for name, seen in self.seen.items())

    def _run(self, run: Callable[[Way, Seen], None], way: Way, seen: Seen) -> None:
        with way.enter():
            run(way, seen)

    def _hold(self, way: Way, seen: Seen) -> None:
        """Ask on one connection again and again; one that fails is replaced."""
        while not self._stop.is_set():
            with _noting(seen) as clock, _connected(way.target, 0) as connection:
                while not self._stop.wait(self._pause):
                    clock.begin()
                    _ask(connection, seen, clock)
            self._stop.wait(self._pause)

    def _renew(self, way: Way, seen: Seen) -> None:
        """Ask on a new connection each time.

        Source ports in turn: one from which it was tried while there were no rules leads nowhere for two minutes.
        """
        first = random.randrange(11000, 30000)
        ports = itertools.cycle([*range(first, 30000), *range(11000, first)])
        last, last_at = "", 0.0
        while not self._stop.wait(self._pause):
            with _noting(seen) as clock, _connected(way.target, next(ports)) as connection:
                pod = _ask(connection, seen, clock)
                if way.affine and last not in ("", pod):
                    seen.failures.append(Failure(last_at, time.monotonic(), "another pod"))
                last, last_at = pod, clock.begun


class _Clock:
    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.begun = time.monotonic()


@contextmanager
def _noting(seen: Seen) -> Iterator[_Clock]:
    """Whatever goes wrong is one failure."""
    clock = _Clock()
    try:
        yield clock
    except OSError as error:
        how = "timeout" if isinstance(error, TimeoutError) else error.strerror or str(error)
        seen.failures.append(Failure(clock.begun, time.monotonic(), how.lower()))


@contextmanager
def _connected(target: Target, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.bind(("", port))
        connection.connect(target)
        yield connection


def _ask(connection: socket.socket, seen: Seen, clock: _Clock) -> str:
    """One line and its answer; returns the name of the pod. Raises OSError."""
    connection.sendall(b"x\n")
    answer = b""
    while not answer.endswith(b"\n"):
        piece = connection.recv(4096)
        if not piece:
            raise ConnectionAbortedError("closed")
        answer += piece
    ended = time.monotonic()
    seen.slowest = max(seen.slowest, ended - clock.begun)
    if ended - clock.begun > SLOW:
        seen.slow.append(Failure(clock.begun, ended, f"slow, {ended - clock.begun:.2f} s"))
    pod = answer.split()[0].decode()
    seen.pods[pod] += 1
    return pod
