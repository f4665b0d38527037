"""Run the API server with Services as a process: `python -m tests.bench.server 5000x10 10.0.0.1`."""

import gc
import signal
import sys

from pykubeproxy.lab.apiserver import ApiServer, Store
from tests.bench import workload


def main(size: str, address: str) -> None:
    """Serve until SIGTERM. Print the port on the first line."""
    stop = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)  # before any thread begins
    server = ApiServer(address, store=Store(workload.SERVICE_CIDRS), watch_list=True)
    server.store.load(workload.objects(workload.Size.read(size)))
    gc.freeze()  # a pause of the server's would be taken for one of the proxy's
    with server:
        print(server.port, flush=True)
        signal.sigwait(stop)


if __name__ == "__main__":
    main(*sys.argv[1:])
