"""The API server as a process of its own, full of Services: `python -m tests.bench.server 5000x10 10.0.0.1`."""

import gc
import signal
import sys

from pykubeproxy.lab.apiserver import ApiServer
from tests.bench import work


def main(size: str, address: str) -> None:
    """Serve until SIGTERM; the first line of output is the port."""
    stop = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)  # before any thread begins
    server = ApiServer(address, service_cidrs=work.SERVICE_CIDRS, watch_list=True)
    server.store.load(work.objects(work.Size.read(size)))
    gc.freeze()  # a pause of the server's would be taken for one of the proxy's
    with server:
        print(server.port, flush=True)
        signal.sigwait(stop)


if __name__ == "__main__":
    main(*sys.argv[1:])
