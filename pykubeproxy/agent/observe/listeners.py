"""Listen on the health and metrics addresses; retry those that are in use."""

import ipaddress
import threading
import time
from collections.abc import Callable, Mapping

import structlog

import pykubeproxy
from pykubeproxy import http
from pykubeproxy.agent import BindFailed
from pykubeproxy.agent.observe.handlers import metrics_pages
from pykubeproxy.agent.observe.health import Health, health_pages
from pykubeproxy.agent.observe.metrics import Metrics
from pykubeproxy.config import Config, ListenAddress
from pykubeproxy.http.server import Server
from pykubeproxy.objects import Family
from pykubeproxy.pages.statusz import AgentStatus, PageFilter

log = structlog.get_logger()


# The kubelet's probes and our commands use it, also on a node with IPv6 only: no Service can redirect it.
_LOOPBACK = "127.0.0.1"
# The pause between two attempts to bind.
_RETRY_SECONDS = 5.0


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
                    self._open(f"{name}-loopback", ListenAddress(_LOOPBACK, address.port), page)

    def close(self) -> None:
        """Close all servers and end the retries."""
        self._closing.set()
        for server in self._servers:
            server.close()

    def _open(self, name: str, address: ListenAddress, page: http.Handler, setting: str = "") -> None:
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

    def _retry(self, name: str, server: Server, address: ListenAddress, page: http.Handler) -> None:
        while not self._closing.wait(_RETRY_SECONDS):
            if not _listen(server, address, page):
                log.info("bind succeeded", server=name, address=str(address))
                return


def _listen(server: Server, address: ListenAddress, page: http.Handler) -> str:
    """Return why the server cannot listen, or "". An unspecified address of either family means both, as in Go."""
    host = "" if ipaddress.ip_address(address.host).is_unspecified else address.host
    try:
        server.listen(host, address.port, page)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def serve_standby(
    config: Config, node_name: str, flags: Mapping[str, object], holder: Callable[[], str]
) -> Listeners:
    """Serve the health and metrics addresses as far as they are free. `holder` returns which agent runs."""
    started = time.time()

    def status(filter_: PageFilter) -> AgentStatus:
        return AgentStatus(
            version=pykubeproxy.__version__,
            node=node_name,
            backend=config.iptables_backend.value,
            started=started,
            now=time.time(),
            healthy=False,
            ready=False,
            alive=True,
            node_eligible=False,
            families=(),
            waits_for=holder(),
            filter=filter_,
        )

    # The other agent may have the addresses.
    listeners, metrics = Listeners(hard_fail=False), Metrics()
    health = health_pages(Health(Family, config.iptables.sync_period), metrics.health_served)
    listeners.open(config, health, metrics_pages(metrics.page, config, flags, status))
    return listeners
