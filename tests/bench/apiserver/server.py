"""The API server of the measurements, which counts requests and events, and changes endpoints.

`python -m tests.bench.apiserver.server SIZE DIRECTORY BOOKMARK_SECONDS` runs it as a process. Its first line of output is
the port. Then each line of input is a number of changes to make; it answers with the counts.
"""

import gc
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import msgspec
import structlog

from pykubeproxy.http import Handler, Request, Response, Send
from pykubeproxy.lab.apiserver import ENDPOINT_SLICES, ApiServer, Store
from pykubeproxy.lab.apiserver.server import locate, verb_of
from tests.bench import workload
from tests.bench.apiserver import objects
from tests.bench.workload import Size
from tests.fakes.cluster import certificate

_PATIENCE = 120.0  # seconds until all watches carry a change
_BOOKMARK = b'{"type":"BOOKMARK"'


class Count(msgspec.Struct):
    """Requests and bytes of their bodies; for watches the events in them, for lists the bytes without gzip."""

    requests: int = 0
    bytes: int = 0
    events: int = 0
    plain: int = 0


class Counts:
    """Counts by verb and resource, such as "list services"; bookmarks have their own. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._by_name: dict[str, Count] = {}

    def middleware(self, handler: Handler) -> Handler:
        """Count what a handler answers."""

        def handle(request: Request) -> Response:
            response = handler(request)
            target = locate(request.path)
            what = target.resource.plural if target else request.path
            name = f"{verb_of(request, target)} {what}"
            self.add(name, requests=1, bytes=len(response.body), plain=_plain(response))
            if response.stream is None:
                return response
            stream = response.stream

            def counted(send: Send, client: int) -> None:
                stream(self._counting(send, what), client)

            return msgspec.structs.replace(response, stream=counted)

        return handle

    def snapshot(self) -> dict[str, Count]:
        """Return the counts so far."""
        with self._changed:
            return {name: msgspec.structs.replace(count) for name, count in self._by_name.items()}

    def wait_for(self, condition: Callable[[dict[str, Count]], bool]) -> None:
        """Wait until the counts meet a condition. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self._by_name), timeout=_PATIENCE):
                raise TimeoutError(f"the counts stay at {self._by_name}")

    def add(self, name: str, **more: int) -> None:
        with self._changed:
            count = self._by_name.setdefault(name, Count())
            for field, number in more.items():
                setattr(count, field, getattr(count, field) + number)
            self._changed.notify_all()

    def _counting(self, send: Send, what: str) -> Send:
        def counted(data: bytes) -> None:
            send(data)
            for line in data.splitlines(keepends=True):
                verb = "bookmark" if line.startswith(_BOOKMARK) else "watch"
                self.add(f"{verb} {what}", bytes=len(line), events=1)

        return counted


def _plain(response: Response) -> int:
    """Return the length of a body without gzip, which ends with it."""
    compressed = ("Content-Encoding", "gzip") in response.headers
    return int.from_bytes(response.body[-4:], "little") if compressed else len(response.body)


class Cluster:
    """An API server with realistic objects. A context manager."""

    def __init__(self, size: Size, folder: Path, bookmark_seconds: float = 60.0) -> None:
        self.counts = Counts()
        self._size, self._changes = size, 0
        self._resources = ExitStack()
        self.certificate, key = certificate(folder)
        self.server = ApiServer(
            # All resources have the newest version at each bookmark, as with kubeadm's etcd.
            store=Store(workload.SERVICE_CIDRS, progress_seconds=bookmark_seconds),
            tls=(self.certificate, key),
            bookmark_seconds=bookmark_seconds,
            middleware=self.counts.middleware,
        )

    def __enter__(self) -> Self:
        self._resources.enter_context(objects.realistic_fields())
        self.server.store.load(objects.objects(self._size))
        self._resources.enter_context(self.server)
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def change(self, number: int, watches: int) -> None:
        """Change EndpointSlices, each once all `watches` have carried the one before."""
        name = f"watch {ENDPOINT_SLICES.plural}"
        for _ in range(number):
            self.server.store.replace(objects.change(self._size, self._changes))
            self._changes += 1
            self.counts.wait_for(lambda counts: counts[name].events >= self._changes * watches)


def main(size: str, folder: str, bookmark_seconds: str) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    with Cluster(Size.read(size), Path(folder), float(bookmark_seconds)) as cluster:
        gc.freeze()
        print(cluster.server.port, flush=True)
        for line in sys.stdin:
            number, watches = map(int, line.split())
            cluster.change(number, watches)
            print(msgspec.json.encode(cluster.counts.snapshot()).decode(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
