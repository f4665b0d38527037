"""The API server as a process of its own."""

import signal
from pathlib import Path

import click
import yaml

from pykubeproxy.lab.apiserver.errors import ApiError
from pykubeproxy.lab.apiserver.resources import JsonObject
from pykubeproxy.lab.apiserver.server import ApiServer


@click.command()
@click.option(
    "--listen", default="127.0.0.1:0", metavar="ADDR:PORT", help="Where to listen; port 0 finds a free one."
)
@click.option("--token", help="Refuse requests without this bearer token.")
@click.option(
    "--objects", type=click.Path(exists=True, path_type=Path), help="YAML or JSON objects to begin with."
)
@click.option("--verbatim", is_flag=True, help="Take the objects as they are: no defaults, no checks.")
@click.option(
    "--service-cidr", "service_cidrs", multiple=True, help="Range of cluster IPs; one for each family."
)
@click.option("--bookmark-seconds", default=60.0, show_default=True, help="Between two bookmarks of a watch.")
@click.option("--watch-list", is_flag=True, help="Serve watches that ask for initial events.")
@click.option(
    "--tls-cert", type=click.Path(exists=True, path_type=Path), help="Serve TLS with this certificate (PEM)."
)
@click.option("--tls-key", type=click.Path(exists=True, path_type=Path), help="The certificate's key (PEM).")
@click.option(
    "--kubeconfig", type=click.Path(path_type=Path), help="Write a kubeconfig for this server here."
)
def main(
    listen: str,
    token: str | None,
    objects: Path | None,
    verbatim: bool,
    service_cidrs: tuple[str, ...],
    bookmark_seconds: float,
    watch_list: bool,
    tls_cert: Path | None,
    tls_key: Path | None,
    kubeconfig: Path | None,
) -> None:
    """Serve a small Kubernetes API until SIGTERM or Ctrl-C.

    The first line of output is the address, such as http://127.0.0.1:40123.
    """
    address, _, port = listen.rpartition(":")
    if not port.isdigit() or not address:
        raise click.BadParameter(
            f"{listen!r} is not ADDR:PORT, such as 127.0.0.1:6443 or [::1]:0", param_hint="--listen"
        )
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key go together")
    server = ApiServer(
        address.strip("[]"),
        int(port),
        service_cidrs=service_cidrs or ("10.96.0.0/16", "fd00:10:96::/112"),
        token=token,
        bookmark_seconds=bookmark_seconds,
        watch_list=watch_list,
        tls=(tls_cert, tls_key) if tls_cert and tls_key else None,
    )
    stop = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)  # before any thread begins, so that all have them blocked
    try:
        server.store.load(_read(objects) if objects else (), verbatim=verbatim)
        server.start()
    except (ApiError, OSError, ValueError, yaml.YAMLError) as error:
        raise click.ClickException(str(error)) from error
    if kubeconfig:
        server.kubeconfig(kubeconfig)
    click.echo(server.url)
    signal.sigwait(stop)
    server.stop()


def _read(path: Path) -> list[JsonObject]:
    """The objects of a file of YAML or JSON documents; a document may be a list of them (kind List)."""
    found: list[JsonObject] = []
    for document in yaml.safe_load_all(path.read_text()):
        if isinstance(document, dict) and isinstance(document.get("items"), list):
            kind, version = str(document.get("kind", "")).removesuffix("List"), document.get("apiVersion")
            common = {"kind": kind, "apiVersion": version} if kind else {}
            found += [common | item for item in document["items"]]
        elif isinstance(document, list):
            found += document
        elif document is not None:
            found.append(document)
    return found


if __name__ == "__main__":
    main(prog_name="python -m pykubeproxy.lab.apiserver")
