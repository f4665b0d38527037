"""The API server that labs and tests hold in their hands."""

import ssl
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from pykubeproxy.lab.apiserver.faults import Faults
from pykubeproxy.lab.apiserver.http import Listener
from pykubeproxy.lab.apiserver.journal import Journal
from pykubeproxy.lab.apiserver.routes import Routes
from pykubeproxy.lab.apiserver.store import Store
from pykubeproxy.lab.apiserver.watching import Switch, Terms


class ApiServer:
    """A small Kubernetes API server on threads of this process.

    A context manager: it listens from `start` (or entry) to `stop` (or exit) and may be started again, on the same
    port and with the same objects. `service_cidrs` are where cluster IPs come from, one range for each family, the
    cluster's own family first. `token`, which may be changed at any time, is the bearer token that requests must
    carry. `tls` is a pair of PEM files, certificate and key. `watch_list` serves watches with sendInitialEvents,
    which are otherwise refused as by a real server whose etcd is too old for them. `store` brings along objects.

    What clients see is told to `store`, `faults` makes the server misbehave, `requests` is what clients asked,
    `watches.running` is how many watches there are.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        port: int = 0,
        *,
        service_cidrs: Sequence[str] = ("10.96.0.0/16", "fd00:10:96::/112"),
        token: str | None = None,
        bookmark_seconds: float = 60.0,
        watch_list: bool = False,
        tls: tuple[Path, Path] | None = None,
        store: Store | None = None,
    ) -> None:
        self.address = address
        self.port = port
        self.store = store or Store(service_cidrs)
        self.requests = Journal()
        self.watches = Switch()
        self.faults = Faults(self.store, self.watches, self._drop)
        self._certificate = tls[0] if tls else None
        self._tls = _context(*tls) if tls else None
        self._listener: Listener | None = None
        terms = Terms(self.store, self.watches, bookmark_seconds, watch_list)
        self._routes = Routes(self.store, self.faults, self.requests, terms, token)

    @property
    def token(self) -> str | None:
        """The bearer token that requests must carry; None if they need none."""
        return self._routes.token

    @token.setter
    def token(self, token: str | None) -> None:
        self._routes.token = token

    @property
    def url(self) -> str:
        """Where it is to be reached, such as http://127.0.0.1:40123."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{'https' if self._tls else 'http'}://{host}:{self.port}"

    def start(self) -> Self:
        """Listen. Raises OSError if the address cannot be had."""
        self._listener = Listener(self.address, self.port, self._routes.answer, self._tls)
        self.port = self._listener.port
        return self

    def stop(self) -> None:
        """Close the port and all connections, and call off all faults. The objects stay."""
        self.faults.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig file for this server, with its token and certificate, and return its path."""
        cluster: dict[str, Any] = {"server": self.url}
        if self._certificate:
            cluster["certificate-authority"] = str(self._certificate.resolve())
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lab", "cluster": cluster}],
            "users": [{"name": "lab", "user": {"token": self.token} if self.token else {}}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab"}}],
            "current-context": "lab",
        }
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _drop(self) -> None:
        if self._listener is not None:
            self._listener.drop()


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
