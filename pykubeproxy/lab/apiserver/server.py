"""The API server as a value for labs and tests."""

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from pykubeproxy.http import Handler, Limits
from pykubeproxy.http.server import Server
from pykubeproxy.lab.apiserver.routes import Routes
from pykubeproxy.lab.apiserver.store import SERVICE_CIDRS, Store
from pykubeproxy.lab.apiserver.watch import WatchOptions

_LIMITS = Limits(
    connections=1024,
    head_bytes=64 * 1024,
    headers=100,
    body_bytes=3 * 1024 * 1024,  # as on a real server
    request_seconds=60.0,
    response_seconds=None,
    idle_seconds=None,
    methods=(),
)


class ApiServer:
    """A small Kubernetes API server on threads of this process.

    A context manager: it listens from `start` to `stop` and can be started again, on the same port and with the same
    objects. `service_cidrs` are the ranges of cluster IPs, one per family, the cluster's primary family first.
    `token`, which may change at any time, is the bearer token that requests must carry. `tls` is a certificate and
    its key (PEM files). Without `watch_list`, watches with sendInitialEvents are refused, as by a real server on an
    old etcd. `middleware` wraps the handler of all requests.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        port: int = 0,
        *,
        service_cidrs: Sequence[str] = SERVICE_CIDRS,
        token: str | None = None,
        bookmark_seconds: float = 60.0,
        watch_list: bool = False,
        tls: tuple[Path, Path] | None = None,
        store: Store | None = None,
        middleware: Callable[[Handler], Handler] = lambda handler: handler,
    ) -> None:
        self.address = address
        self.port = port
        self.token = token
        self.store = store or Store(service_cidrs)
        self._certificate = tls[0] if tls else None
        self._tls = _context(*tls) if tls else None
        self._server: Server | None = None
        watches = WatchOptions(bookmark_seconds, watch_list)
        self._handler = middleware(Routes(self.store, watches, lambda: self.token).handle)

    @property
    def url(self) -> str:
        """The URL, such as http://127.0.0.1:40123."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{'https' if self._tls else 'http'}://{host}:{self.port}"

    def start(self) -> Self:
        """Listen. Raise OSError if the bind fails."""
        self._server = Server("apiserver", _LIMITS)
        try:
            self._server.listen(self.address, self.port, self._handler, self._tls)
        except OSError:
            self.stop()
            raise
        ((_, self.port),) = self._server.addresses()
        return self

    def stop(self) -> None:
        """Close the port and all connections. The objects stay."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def drop_connections(self) -> None:
        """Close all connections; keep listening."""
        if self._server is not None:
            self._server.drop_connections()

    def kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig with the server's token and certificate, and return its path."""
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


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
