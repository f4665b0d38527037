"""Run the API server with Services as a process: `python -m tests.bench.server 5000x10 10.0.0.1 FOLDER`.

It listens on two ports with the same objects: with the TLS certificate in FOLDER for proxies, and in plain HTTP for the
benchmark. FOLDER/requests.log gets a line for each read of a proxy: the time.monotonic() and the path.
"""

import gc
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pykubeproxy.http import Handler, Request, Response
from pykubeproxy.lab.apiserver import ApiServer, Store
from tests.bench import workload

CERTIFICATE, KEY, REQUESTS = "ca.crt", "server.key", "requests.log"


def main(size: str, address: str, folder: str) -> None:
    """Serve until SIGTERM. Print both ports, that of TLS first, on the first line."""
    stop = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)  # before any thread begins
    directory, store = Path(folder), Store(workload.SERVICE_CIDRS)
    store.load(workload.objects(workload.Size.read(size)))
    with (
        ApiServer(
            address,
            store=store,
            watch_list=True,
            tls=(directory / CERTIFICATE, directory / KEY),
            middleware=_logging(directory / REQUESTS),
        ) as server,
        ApiServer(address, store=store) as plain,
    ):
        gc.freeze()  # a pause of the server's would be taken for one of the proxy's
        print(server.port, plain.port, flush=True)
        signal.sigwait(stop)


def _logging(file: Path) -> Callable[[Handler], Handler]:
    """Return a middleware that logs the time and path of each request to a file."""
    file.unlink(missing_ok=True)
    log = file.open("a", buffering=1)

    def wrap(handler: Handler) -> Handler:
        def handle(request: Request) -> Response:
            log.write(f"{time.monotonic()} {request.path}?{request.query}\n")
            return handler(request)

        return handle

    return wrap


if __name__ == "__main__":
    main(*sys.argv[1:])
