"""Connections to an API server that an Attempt can cancel."""

import hashlib
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import urllib3
from kubernetes.client.configuration import Configuration
from kubernetes.client.rest import RESTClientObject
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import ConnectTimeoutError, NameResolutionError, NewConnectionError

from pykubeproxy.sources.addresses import ServerAddresses
from pykubeproxy.sources.attempt import current
from pykubeproxy.sources.watch import SourceError
from pykubeproxy.wording import without_password

_CONNECT_TIMEOUT = 5.0  # seconds per address
_HANDSHAKE_TIMEOUT = 10.0  # as in client-go


class Keepalive(msgspec.Struct, frozen=True):
    """When the kernel probes an idle connection and gives it up, in seconds.

    A peer that acknowledges nothing is noticed at the first probe after `timeout`.
    """

    idle: int = 20
    interval: int = 5
    timeout: int = 38

    def options(self) -> list[tuple[int, int, int]]:
        """Return the options of a socket."""
        return [
            *HTTPConnection.default_socket_options,
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self.idle),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self.interval),
            # Replaces TCP_KEEPCNT, and applies to data that waits for an acknowledgement too.
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * self.timeout),
        ]


class Transport:
    """The connections to the server of a configuration; they add its addresses to `addresses`.

    Raises SourceError for a proxy that cannot be used.
    """

    def __init__(
        self, configuration: Configuration, keepalive: Keepalive, addresses: ServerAddresses
    ) -> None:
        self._identity = _identity(configuration)
        proxy = str(configuration.proxy or "http://")
        if not proxy.startswith(("http://", "https://")):
            raise SourceError(f"cannot use proxy {without_password(proxy)}: use an http:// or https:// URL")
        configuration.socket_options = keepalive.options()
        self._host = str(configuration.host)
        self._pools = RESTClientObject(configuration).pool_manager
        self._pools.pool_classes_by_scheme = _pool_classes(addresses)
        url = self._pools.proxy or urllib3.util.parse_url(self._host)
        addresses.add(url.host or "", url.port or urllib3.connection.port_by_scheme[url.scheme or "http"])

    def fits(self, configuration: Configuration) -> bool:
        """Return whether a configuration has the same server, proxy and TLS settings, and the same certificates."""
        return self._identity == _identity(configuration)

    def drop_idle(self) -> None:
        """Close connections that no request uses."""
        self._pools.clear()

    def send(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | None, seconds: float
    ) -> urllib3.BaseHTTPResponse:
        """Send a request and return the response, its body not yet read. Call on the thread of an Attempt.

        Each read of the response times out after `seconds`.
        """
        return self._pools.request(
            method,
            self._host + target,
            headers=headers,
            body=body,
            timeout=urllib3.Timeout(connect=_CONNECT_TIMEOUT, read=seconds),
            preload_content=False,
        )


def _identity(configuration: Configuration) -> tuple[object, ...]:
    """Return all that distinguishes connections. Files may change in place, so their contents count."""
    files = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
    names = ("host", "proxy", "no_proxy", "verify_ssl", "tls_server_name", "assert_hostname", "ca_cert_data")
    settings = (getattr(configuration, name, None) for name in names)
    return (*files, *settings, *(_digest(file) for file in files))


def _digest(path: str | None) -> bytes:
    try:
        return hashlib.sha256(Path(path).read_bytes()).digest() if path else b""
    except OSError:
        return b""  # the connection reports it


class _Held:
    """Connect, and let the current attempt hold the connection."""

    addresses: ServerAddresses

    def _new_conn(self: Any) -> socket.socket:
        attempt = current()
        attempt.missing = "connection to"
        error: Exception = OSError("the name has no address")
        for family, kind, protocol, _, address in self._resolve():
            try:
                connection = socket.socket(family, kind, protocol)
                try:
                    attempt.hold(connection)
                    for option in self.socket_options or ():
                        connection.setsockopt(*option)
                    connection.settimeout(self.timeout)
                    connection.connect(address)
                except OSError:
                    connection.close()
                    raise
                connection.settimeout(_HANDSHAKE_TIMEOUT)
                return connection
            except OSError as failed:
                error = failed
        if isinstance(error, TimeoutError):
            raise ConnectTimeoutError(self, f"connecting to {self.host} timed out") from error
        raise NewConnectionError(self, f"connecting to {self.host} failed: {error}") from error

    def _resolve(self: Any) -> list[Any]:
        try:
            found = socket.getaddrinfo(self._dns_host.strip("[]"), self.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            raise NameResolutionError(self.host, self, error) from error
        for *_, address in found:
            self.addresses.add(address[0], self.port)
        return found

    def request(self: Any, *arguments: Any, **options: Any) -> None:
        attempt = current()
        if self.sock is not None:  # from the pool, or after a TLS handshake
            attempt.hold(self.sock)
        super().request(*arguments, **options)  # type: ignore[misc]
        attempt.missing = "response from"

    def connect(self: Any) -> None:
        try:
            super().connect()  # type: ignore[misc]
        except TimeoutError as error:  # of the TLS handshake, or of a proxy
            raise ConnectTimeoutError(self, f"connecting to {self.host} timed out") from error


def _pool_classes(known: ServerAddresses) -> dict[str, type[HTTPConnectionPool]]:
    class Connection(_Held, HTTPConnection):
        addresses = known

    class TlsConnection(_Held, HTTPSConnection):
        addresses = known

    class Pool(HTTPConnectionPool):
        ConnectionCls = Connection

    class TlsPool(HTTPSConnectionPool):
        ConnectionCls = TlsConnection

    return {"http": Pool, "https": TlsPool}
