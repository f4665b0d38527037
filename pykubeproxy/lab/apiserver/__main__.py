"""The API server as a process."""

import signal
import sys
from pathlib import Path
from typing import Any

import click
import structlog

from pykubeproxy.config import yaml
from pykubeproxy.lab.apiserver.kubelet import Runtime, Sandbox, no_runtime
from pykubeproxy.lab.apiserver.resources import ApiError, JsonObject
from pykubeproxy.lab.apiserver.server import ApiServer

_FILE = click.Path(exists=True, path_type=Path)


@click.command()
@click.option(
    "--listen", default="127.0.0.1:0", metavar="ADDR:PORT", help="Listen here; port 0 selects a free one."
)
@click.option("--token", help="Refuse requests without this bearer token.")
@click.option("--objects", type=_FILE, help="Start with the objects of this YAML or JSON file.")
@click.option("--watch-list", is_flag=True, help="Serve watches with sendInitialEvents.")
@click.option("--tls-cert", type=_FILE, help="Serve TLS with this certificate (PEM).")
@click.option("--tls-key", type=_FILE, help="The certificate's key (PEM).")
@click.option("--lab", metavar="NAME", help="Run the commands of exec in this lab's network namespaces.")
@click.option("--kubeconfig", type=click.Path(path_type=Path), help="Write a kubeconfig for this server.")
def main(
    listen: str,
    token: str | None,
    objects: Path | None,
    watch_list: bool,
    tls_cert: Path | None,
    tls_key: Path | None,
    lab: str | None,
    kubeconfig: Path | None,
) -> None:
    """Serve a small Kubernetes API until SIGTERM or Ctrl-C.

    The first line of output is the URL, such as http://127.0.0.1:40123.
    """
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    address, _, port = listen.rpartition(":")
    if not port.isdigit() or not address:
        message = f"{listen!r} is not ADDR:PORT, such as 127.0.0.1:6443 or [::1]:0"
        raise click.BadParameter(message, param_hint="--listen")
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key go together")
    tls = (tls_cert, tls_key) if tls_cert and tls_key else None
    runtime = lab_runtime(lab) if lab else no_runtime
    server = ApiServer(
        address.strip("[]"), int(port), token=token, watch_list=watch_list, tls=tls, runtime=runtime
    )
    stop = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)  # before any thread starts, so that all have them blocked
    try:
        server.store.load(_read(objects) if objects else ())
        server.start()
    except (ApiError, OSError, ValueError, yaml.YAMLError) as error:
        raise click.ClickException(str(error)) from error
    if kubeconfig:
        server.kubeconfig(kubeconfig)
    click.echo(server.url)
    signal.sigwait(stop)
    server.stop()


def lab_runtime(lab: str) -> Runtime:
    """Return where the commands of pods run in a lab."""

    def run_in(pod: JsonObject) -> Sandbox:
        from pykubeproxy.lab.agents import (
            sandbox,  # imports pyroute2, which the start of a server need not wait for
        )

        return sandbox(lab, pod)

    return run_in


def _read(path: Path) -> list[Any]:
    """Return the objects of a file of YAML or JSON documents, items of Lists included."""
    items: list[Any] = []
    for _, document, _ in yaml.documents(path.read_text()):
        if isinstance(document, dict) and isinstance(document.get("items"), list):
            kind, version = str(document.get("kind", "")).removesuffix("List"), document.get("apiVersion")
            items += [{"kind": kind, "apiVersion": version} | item for item in document["items"]]
        elif document is not None:
            items.append(document)
    return items


if __name__ == "__main__":
    main(prog_name="python -m pykubeproxy.lab.apiserver")
