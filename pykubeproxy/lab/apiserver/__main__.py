"""The API server of a lab as a process."""

import argparse
import signal
import sys

import click
import structlog

from pykubeproxy.lab.apiserver.kubelet import Runtime, Sandbox
from pykubeproxy.lab.apiserver.resources import JsonObject
from pykubeproxy.lab.apiserver.server import ApiServer


def main(server: type[ApiServer] = ApiServer) -> None:
    """Serve until SIGTERM or Ctrl-C. The first line of output is the URL, such as http://10.0.0.1:6443."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--listen", metavar="ADDR:PORT", required=True)
    parser.add_argument("--lab", metavar="NAME", required=True, help="run commands of pods in this lab")
    options = parser.parse_args()
    address, _, port = options.listen.rpartition(":")
    stop = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)  # before any thread starts, so that all have them blocked
    with server(address, int(port), runtime=_lab_runtime(options.lab)) as running:
        click.echo(running.url)
        signal.sigwait(stop)


def _lab_runtime(lab: str) -> Runtime:
    """Return where the commands of pods run in a lab."""

    def run_in(pod: JsonObject) -> Sandbox:
        # Imports pyroute2, which the start of a server need not wait for.
        from pykubeproxy.lab.agents import sandbox

        return sandbox(lab, pod)

    return run_in


if __name__ == "__main__":
    main()
