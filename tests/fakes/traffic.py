"""Many Services in a lab, and connections to them that record every failure."""

import itertools
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from pykubeproxy.lab.api import NAMESPACES, SERVICES, SLICES, Api, Object, in_namespace, namespace
from pykubeproxy.lab.api import POD_PORT as PORT
from pykubeproxy.lab.prober import ProbeTarget
from pykubeproxy.services.ports import PortName

# A separate namespace, which Lab.reset does not delete.
NAMESPACE = "crowd"
# Near the first addresses and node ports (30086) that the lab's API server allocates.
FIRST_ADDRESSES, FIRST_NODE_PORT = ("10.96.1.0", "fd00:10:96::100"), 30081
_PORT = 80
_AT_ONCE = 3


class Crowd(NamedTuple):
    """Services of the same pods, whose IPv4 and IPv6 addresses are `pods`.

    `stride` is the distance between their addresses and node ports. Every `both`-th Service has both families and a
    node port; the others have IPv4 only.
    """

    api: Api
    pods: Sequence[tuple[str, str]]
    stride: int = 1
    both: int = 1

    def create(self, numbers: range) -> None:
        """Create the Services of these numbers, from 0 on, and their EndpointSlices in parallel."""
        self.api.put(NAMESPACES, NAMESPACE, namespace(NAMESPACE))
        with ThreadPoolExecutor(_AT_ONCE) as writers:
            list(writers.map(self._create, numbers))

    def delete(self, numbers: range) -> None:
        """Delete the Services of these numbers and their EndpointSlices."""
        with ThreadPoolExecutor(_AT_ONCE) as writers:
            list(writers.map(self._delete, numbers))

    def vip(self, number: int) -> ProbeTarget:
        """Return the IPv4 cluster IP and port of a Service."""
        return ProbeTarget(self._addresses(number)[0], _PORT)

    def port_name(self, number: int) -> PortName:
        """Return the service port that names a Service's chains."""
        return PortName(NAMESPACE, _name(number), "http", "TCP")

    def _create(self, number: int) -> None:
        self.api.call("POST", in_namespace(SERVICES, NAMESPACE), self._service(number))
        for slice_ in self._slices(number):
            self.api.call("POST", in_namespace(SLICES, NAMESPACE), slice_)

    def _delete(self, number: int) -> None:
        self.api.delete(f"{in_namespace(SERVICES, NAMESPACE)}/{_name(number)}")
        for slice_ in self._slices(number):
            self.api.delete(f"{in_namespace(SLICES, NAMESPACE)}/{slice_['metadata']['name']}")

    def _families(self, number: int) -> tuple[str, ...]:
        return ("IPv4", "IPv6") if number % self.both == 0 else ("IPv4",)

    def _addresses(self, number: int) -> list[str]:
        firsts = FIRST_ADDRESSES[: len(self._families(number))]
        return [str(ip_address(first) + number * self.stride) for first in firsts]

    def _service(self, number: int) -> Object:
        addresses, families = self._addresses(number), self._families(number)
        port: Object = {"name": "http", "protocol": "TCP", "port": _PORT, "targetPort": PORT}
        if len(families) == 2:
            port["nodePort"] = FIRST_NODE_PORT + number // self.both * self.stride
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": _name(number), "namespace": NAMESPACE},
            "spec": {
                "type": "NodePort" if "nodePort" in port else "ClusterIP",
                "clusterIP": addresses[0],
                "clusterIPs": addresses,
                "ipFamilies": list(families),
                "ipFamilyPolicy": "SingleStack" if len(families) == 1 else "RequireDualStack",
                "ports": [port],
            },
        }

    def _slices(self, number: int) -> list[Object]:
        return [
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": f"{_name(number)}-{family.lower()}",
                    "namespace": NAMESPACE,
                    "labels": {"kubernetes.io/service-name": _name(number)},
                },
                "addressType": family,
                "ports": [{"name": "http", "protocol": "TCP", "port": PORT}],
                "endpoints": [
                    {"addresses": [pod[family == "IPv6"]], "conditions": {"ready": True}} for pod in self.pods
                ],
            }
            for family in self._families(number)
        ]


def _name(number: int) -> str:
    return f"s{number:04}"


ECHO = Path(__file__).with_name("echo.py")
TIMEOUT = 3.0  # seconds without an answer are a failure
SLOW = 0.9  # a lost packet is retransmitted after a second

Enter = Callable[[], AbstractContextManager[None]]


def echo_command(name: str, *addresses: str) -> list[str]:
    """Return the command of an echo pod."""
    return [sys.executable, "-I", "-S", str(ECHO), name, *(addresses or ("0.0.0.0", "::"))]


class Failure(NamedTuple):
    """A failed connection: when it began or last answered, when the failure was noticed, and the reason."""

    begun: float
    noticed: float
    how: str


@dataclass
class TrafficStats:
    """Answers by pod, failures and slow answers of one kind of connection.

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


class TrafficRoute(NamedTuple):
    """A source and a target of connections; `affine` if all must reach the same pod."""

    name: str
    target: ProbeTarget
    enter: Enter = nullcontext
    affine: bool = False


class Traffic:
    """Hold one connection and open new ones on each route while the context lasts."""

    def __init__(self, routes: Iterable[TrafficRoute], pause: float = 0.02) -> None:
        self.seen: dict[str, TrafficStats] = {}
        self._pause = pause
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        for route in routes:
            for kind, run in (("held", self._hold), ("new", self._renew)):
                seen = self.seen[f"{route.name}, {kind}"] = TrafficStats()
                thread = threading.Thread(target=self._run, args=(run, route, seen), daemon=True)
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
        """Return the failures by route; routes without failures are left out."""
        return {name: list(seen.failures) for name, seen in self.seen.items() if seen.failures}

    def total(self) -> int:
        """Return the number of answers."""
        return sum(seen.pods.total() for seen in self.seen.values())

    def __str__(self) -> str:
        return "\n".join(f"  {name}: {seen}" for name, seen in self.seen.items())

    def _run(
        self, run: Callable[[TrafficRoute, TrafficStats], None], route: TrafficRoute, seen: TrafficStats
    ) -> None:
        with route.enter():
            run(route, seen)

    def _hold(self, route: TrafficRoute, seen: TrafficStats) -> None:
        """Send on one connection repeatedly; replace it after a failure."""
        while not self._stop.is_set():
            with _recording_failure(seen) as clock, _connected(route.target, 0) as connection:
                while not self._stop.wait(self._pause):
                    clock.begin()
                    _send_line(connection, seen, clock)
            self._stop.wait(self._pause)

    def _renew(self, route: TrafficRoute, seen: TrafficStats) -> None:
        """Send on a new connection each time.

        Source ports rotate, because one that was tried without rules keeps failing for two minutes.
        """
        first = random.randrange(11000, 30000)
        ports = itertools.cycle([*range(first, 30000), *range(11000, first)])
        last, last_at = "", 0.0
        while not self._stop.wait(self._pause):
            with _recording_failure(seen) as clock, _connected(route.target, next(ports)) as connection:
                pod = _send_line(connection, seen, clock)
                if route.affine and last not in ("", pod):
                    seen.failures.append(Failure(last_at, time.monotonic(), "another pod"))
                last, last_at = pod, clock.begun


class _Clock:
    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.begun = time.monotonic()


@contextmanager
def _recording_failure(seen: TrafficStats) -> Iterator[_Clock]:
    """Record any error as one failure."""
    clock = _Clock()
    try:
        yield clock
    except OSError as error:
        how = "timeout" if isinstance(error, TimeoutError) else error.strerror or str(error)
        seen.failures.append(Failure(clock.begun, time.monotonic(), how.lower()))


@contextmanager
def _connected(target: ProbeTarget, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.bind(("", port))
        connection.connect(target)
        yield connection


def _send_line(connection: socket.socket, seen: TrafficStats, clock: _Clock) -> str:
    """Send one line and return the name of the answering pod. Raise OSError on failure."""
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
