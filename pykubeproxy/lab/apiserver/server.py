"""The API server as a value for labs and tests."""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Self

from pykubeproxy.config import yaml
from pykubeproxy.http import Handler, Limits
from pykubeproxy.http.server import Server
from pykubeproxy.lab.apiserver.exec import Runtime, no_runtime
from pykubeproxy.lab.apiserver.kubelet import Kubelet
from pykubeproxy.lab.apiserver.routes import Routes
from pykubeproxy.lab.apiserver.store import Store
from pykubeproxy.lab.apiserver.watch import WatchOptions
from pykubeproxy.objects import address_and_port

_LIMITS = Limits(
    connections=1024,
    head_bytes=64 * 1024,
    headers=100,
    body_bytes=3 * 1024 * 1024,  # as on a real server
    request_seconds=60.0,
    response_seconds=None,
    idle_seconds=None,
)


class ApiServer:
    """A small Kubernetes API server on threads of this process.

    A context manager: it listens from `start` to `stop` and can be started again, on the same port and with the same
    objects. `token`, which may change at any time, is the bearer token that requests must carry. `tls` is a
    certificate and its key (PEM files). Without `watch_list`, watches with sendInitialEvents are refused, as by a
    real server on an old etcd. `middleware` wraps the handler of all requests.
    With a `runtime`, which tells where the commands of pods run, it serves exec and runs the pods that clients create
    on its nodes.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        bookmark_seconds: float = 60.0,
        watch_list: bool = False,
        tls: tuple[Path, Path] | None = None,
        store: Store | None = None,
        runtime: Runtime = no_runtime,
        middleware: Callable[[Handler], Handler] = lambda handler: handler,
    ) -> None:
        self.address = address
        self.port = port
        self.token = token
        self.store = store or Store()
        self._tls = tls
        self._server: Server | None = None
        self._kubelet: Kubelet | None = None
        self._runs_pods = runtime is not no_runtime
        watches = WatchOptions(bookmark_seconds, watch_list)
        self._handler = middleware(Routes(self.store, watches, lambda: self.token, runtime).handle)

    @property
    def url(self) -> str:
        """The URL, such as http://127.0.0.1:40123."""
        return f"{'https' if self._tls else 'http'}://{address_and_port(self.address, self.port)}"

    def start(self) -> Self:
        """Listen. Raises OSError if the bind fails."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if self._tls else None
        if context and self._tls:
            context.load_cert_chain(*self._tls)
        self._server = Server("apiserver", _LIMITS)
        try:
            self._server.listen(self.address, self.port, self._handler, context)
        except OSError:
            self.stop()
            raise
        ((_, self.port),) = self._server.addresses()
        if self._runs_pods:
            self._kubelet = Kubelet(self.store)
        return self

    def stop(self) -> None:
        """Close the port and all connections. The objects stay."""
        if self._kubelet is not None:
            self._kubelet.stop()
            self._kubelet = None
        if self._server is not None:
            self._server.close()
            self._server = None

    def drop_connections(self) -> None:
        """Close all connections; keep listening."""
        if self._server is not None:
            self._server.drop_connections()

    def kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig with the server's token and certificate, and return its path."""
        path.touch(mode=0o600)
        path.write_text(kubeconfig(self.url, self.token, self._tls[0] if self._tls else None))
        return path

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def kubeconfig(url: str, token: str | None = None, certificate: Path | None = None) -> str:
    """Return a kubeconfig for a server."""
    cluster = {"server": url} | ({"certificate-authority": str(certificate.resolve())} if certificate else {})
    return yaml.dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lab", "cluster": cluster}],
            "users": [{"name": "lab", "user": {"token": token} if token else {}}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab"}}],
            "current-context": "lab",
        }
    )
