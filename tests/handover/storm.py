"""Clients in several namespaces that open connections as fast as they can, or at a rate."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from pykubeproxy.lab.network import Namespace
from tests.handover.capture import Endpoint
from tests.handover.services import Route, Source

_CLIENT = Path(__file__).with_name("client.py")
_AT_ONCE = 24  # connections under way in each client
_READY_SECONDS = 30.0
# The part of the connections that each client opens; the one from outside has the most routes.
_SHARES = {Source.OUTSIDE: 0.45, Source.POD: 0.3, Source.ENDPOINT: 0.1, Source.HOST: 0.15}


class Failure(NamedTuple):
    """A failed connection: when it was reported, seconds since it began, its route, and both ends at the client."""

    noticed: float
    seconds: float
    how: str
    route: str
    source: Endpoint
    target: Endpoint

    def __str__(self) -> str:
        return f"{self.route}: {self.how} after {self.seconds:.3f} s, {self.source} > {self.target}"


class Storm:
    """Opens connections while the context lasts, `rate` a second at most.

    Calls `on_failure` from another thread for the first connection that fails or is late.
    """

    def __init__(
        self,
        namespaces: Mapping[Source, Namespace],
        routes: Sequence[Route],
        rate: float,
        directory: Path,
        on_failure: Callable[[Failure], None],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[Failure] = []
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._witness: threading.Thread | None = None
        self._ready = threading.Semaphore(0)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._clients = [
            (namespaces[source], self._write(directory, source, routes, rate * share))
            for source, share in _SHARES.items()
        ]

    def _write(self, directory: Path, source: Source, routes: Sequence[Route], rate: float) -> Path:
        own = [it._asdict() | {"source": source.value} for it in routes if it.source is source]
        path = directory / f"client-{source.value}.json"
        path.write_text(json.dumps({"routes": own, "at_once": _AT_ONCE, "rate": rate}))
        return path

    def __enter__(self) -> "Storm":
        for namespace, path in self._clients:
            command = [sys.executable, "-I", "-S", str(_CLIENT), str(path)]
            with path.with_suffix(".log").open("wb") as errors:
                process = namespace.spawn(command, output=subprocess.PIPE, errors=errors)
            assert process.stdout
            reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
            self._processes.append(process)
            self._readers.append(reader)
            reader.start()
        for _ in self._processes:
            if not self._ready.acquire(timeout=_READY_SECONDS):
                self.check()
                raise TimeoutError(f"a client does not start; see {self._clients[0][1].parent}")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for reader, process in zip(self._readers, self._processes, strict=True):
            reader.join()
            process.wait()
        if self._witness:
            self._witness.join()

    def check(self) -> None:
        """Raise RuntimeError if a client has ended."""
        for (_, path), process in zip(self._clients, self._processes, strict=True):
            if process.poll() is not None:
                raise RuntimeError(f"a client ended: {path.with_suffix('.log').read_text()}")

    def opened(self) -> int:
        """Return the number of new connections and datagrams that succeeded or failed."""
        with self._lock:
            succeeded = sum(
                count for name, count in self.counts.items() if not name.startswith(("held ", "slow "))
            )
            return succeeded + len(self.failures)

    def _read(self, output: IO[bytes]) -> None:
        with output:
            for line in output:
                self._note(json.loads(line))

    def _note(self, document: dict[str, Any]) -> None:
        if "ready" in document:
            self._ready.release()
        elif counts := document.get("counts"):
            with self._lock:
                self.counts.update(counts)
        elif "route" in document:
            failure = _failure(document)
            with self._lock:
                if "failure" in document:
                    self.failures.append(failure)
                if self._witness is None:
                    self._witness = threading.Thread(target=self._on_failure, args=(failure,))
                    self._witness.start()


def _failure(document: Mapping[str, Any]) -> Failure:
    source, target = (Endpoint(*document[end]) for end in ("source", "target"))
    how = document.get("failure", "late")
    return Failure(time.time(), document["seconds"], how, document["route"], source, target)
