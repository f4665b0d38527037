"""Listen on the health and metrics addresses; retry those that are in use."""

import ipaddress
import threading

import structlog

from pykubeproxy import http
from pykubeproxy.agent import BindFailed
from pykubeproxy.config import Address, Config
from pykubeproxy.http.server import Server

# The kubelet's probes and our commands use it, also on a node with IPv6 only: no Service can redirect it.
_LOOPBACK = "127.0.0.1"
# The pause between two attempts to bind.
_RETRY_SECONDS = 5.0

log = structlog.get_logger()


class Listeners:
    """The servers of the health and metrics addresses. Call from the loop thread only."""

    def __init__(self, hard_fail: bool) -> None:
        self._hard_fail = hard_fail
        self._servers: list[Server] = []
        self._closing = threading.Event()

    def open(self, config: Config, health: http.Handler, metrics: http.Handler) -> None:
        """Serve the pages at the addresses of the configuration, and on loopback too, for probes and commands.

        If a bind fails, retry in a thread until it works. With `hard_fail`, raises BindFailed instead.
        """
        for name, address, page, setting in (
            ("health", config.health_address, health, "healthzBindAddress"),
            ("metrics", config.metrics_address, metrics, "metricsBindAddress"),
        ):
            if address:
                self._open(name, address, page, setting)
                if not ipaddress.ip_address(address.host).is_unspecified and address.host != _LOOPBACK:
                    self._open(f"{name}-loopback", Address(_LOOPBACK, address.port), page)

    def close(self) -> None:
        """Close all servers and end the retries."""
        self._closing.set()
        for server in self._servers:
            server.close()

    def _open(self, name: str, address: Address, page: http.Handler, setting: str = "") -> None:
        """Listen on one address; without a `setting`, the agent can do without it."""
        server = Server(name)
        self._servers.append(server)
        if not (reason := _listen(server, address, page)):
            return
        if self._hard_fail and setting:
            raise BindFailed(
                name, f"cannot bind {address}: {reason}; stop the other process or set {setting}"
            )
        log.error("bind failed, retrying", server=name, address=str(address), reason=reason)
        arguments = (name, server, address, page)
        threading.Thread(target=self._retry, args=arguments, name=f"{name}-retry", daemon=True).start()

    def _retry(self, name: str, server: Server, address: Address, page: http.Handler) -> None:
        while not self._closing.wait(_RETRY_SECONDS):
            if not _listen(server, address, page):
                log.info("bind succeeded", server=name, address=str(address))
                return


def _listen(server: Server, address: Address, page: http.Handler) -> str:
    """Return why the server cannot listen, or "". An unspecified address of either family means both, as in Go."""
    host = "" if ipaddress.ip_address(address.host).is_unspecified else address.host
    try:
        server.listen(host, address.port, page)
    except OSError as error:
        return error.strerror or str(error)
    return ""
