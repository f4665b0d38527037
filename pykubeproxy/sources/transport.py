"""Connections to an API server, each read of which ends in time, and the bodies of its responses."""

import hashlib
import http.client
import io
import ipaddress
import math
import select
import socket
import ssl
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import (
    ConnectTimeoutError,
    InsecureRequestWarning,
    NameResolutionError,
    NewConnectionError,
)
from urllib3.util import Url, make_headers, parse_url

from pykubeproxy.sources.credentials import ServerConfig
from pykubeproxy.sources.failures import Failure, ResponseTimeout
from pykubeproxy.sources.proxies import SOCKS, request_connection, user_of
from pykubeproxy.wording import without_password

# Keep only the newest ones: a load balancer may change its addresses again and again.
_MOST = 64

Address = tuple[str, int]
_GZIP = zlib.MAX_WBITS | 16
_PIECE = 1 << 16
_CORRUPT = "check proxies in between, or set disable-compression in the kubeconfig"
_CONNECT_TIMEOUT = 5.0  # seconds per address
_HANDSHAKE_TIMEOUT = 10.0  # as in client-go
_MAX_IDLE = 16  # connections kept for later requests
_PORTS = {"http": 80, "https": 443} | dict.fromkeys(SOCKS, 1080)


class ServerAddresses:
    """Collect the address and port of the server, or of the proxy in front of it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[Address, None] = {}  # oldest first
        self.known: frozenset[Address] = frozenset()

    def add(self, host: str, port: int) -> None:
        """Add an IP address; ignore a name."""
        try:
            address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
        except ValueError:
            return
        # Packets to a mapped address are IPv4.
        address = getattr(address, "ipv4_mapped", None) or address
        with self._lock:
            self._seen.pop((str(address), port), None)
            self._seen[str(address), port] = None
            while len(self._seen) > _MOST:
                del self._seen[next(iter(self._seen))]
            self.known = frozenset(self._seen)


def content(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Yield the body of a response in pieces of at most 64 KiB, unpacked if the server compressed it. Raises Failure."""
    body = iter(lambda: response.read1(_PIECE, decode_content=False), b"")
    compressed = response.headers.get("Content-Encoding", "").lower() == "gzip"
    return unpacked(body) if compressed else body


def unpacked(body: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the contents of gzip data in pieces of at most 64 KiB. Raises Failure if it is corrupt or incomplete."""
    member, begun = zlib.decompressobj(_GZIP), False
    for data in body:
        while data:
            begun = True
            try:
                piece = member.decompress(data, _PIECE)
            except zlib.error as error:
                raise Failure(
                    f"the API server sent corrupt gzip data ({error}): {_CORRUPT}", persistent=True
                ) from None
            if piece:
                yield piece
            data = member.unconsumed_tail
            if member.eof:
                # Further members may follow.
                data, member, begun = member.unused_data, zlib.decompressobj(_GZIP), False
    if begun:
        raise Failure(
            f"the API server's response ended in the middle of gzip data: {_CORRUPT}", persistent=True
        )


class Keepalive(msgspec.Struct, frozen=True):
    """When the kernel probes an idle connection and gives it up, in seconds.

    A peer that acknowledges nothing is noticed at the first probe after `timeout`.
    """

    idle: int = 15
    interval: int = 5
    timeout: int = 30

    def options(self) -> list[tuple[int, int, int]]:
        """Return the options of a socket."""
        return [
            *HTTPConnection.default_socket_options,
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self.interval),
            *((socket.IPPROTO_TCP, option, value) for option, value in self._by_system()),
        ]

    def _by_system(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the options for `idle` and `timeout`."""
        if sys.platform == "linux":
            # TCP_USER_TIMEOUT replaces TCP_KEEPCNT, and applies to data that waits for an acknowledgement too.
            return (socket.TCP_KEEPIDLE, self.idle), (socket.TCP_USER_TIMEOUT, 1000 * self.timeout)
        probes = -(-(self.timeout - self.idle) // self.interval)
        return (socket.TCP_KEEPALIVE, self.idle), (socket.TCP_KEEPCNT, probes)


class Deadline:
    """When a thread stops waiting for the next part of an exchange, and the failure that it raises then."""

    def __init__(self, server: str, seconds: float) -> None:
        self._server, self._seconds = server, seconds
        self.end = time.monotonic() + seconds
        self.failure: Failure = ResponseTimeout("")
        self.expect("connection to")

    def expect(self, part: str) -> None:
        """Name the part that is missing if the time is over now, such as "response from"."""
        self.failure = ResponseTimeout(f"no {part} {self._server} within {self._seconds:.0f} s")

    def left(self, most: float = math.inf) -> float:
        """Return the seconds that are left, at most `most`. Raises Failure if none are."""
        seconds = self.end - time.monotonic()
        if seconds <= 0:
            raise self.failure
        return min(seconds, most)


_local = threading.local()  # has the deadline of the exchange that its thread begins


class LimitedSocket:
    """A connection for another protocol, each read of which ends at a deadline."""

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        self._connection, self._deadline = connection, deadline

    def recv(self, size: int) -> bytes:
        """Receive some bytes. Raises Failure at the deadline."""
        self._connection.settimeout(self._deadline.left())
        try:
            return self._connection.recv(size)
        except TimeoutError:
            self._deadline.left()
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class Transport:
    """The connections to a server; they add its addresses to `addresses`."""

    def __init__(self, config: ServerConfig, keepalive: Keepalive, addresses: ServerAddresses) -> None:
        self._identity = _identity(config)
        self._server = without_password(config.url)
        server, proxy = parse_url(self._server), parse_url(config.proxy or "")
        self._pools = _pools(config, keepalive, addresses)
        # A proxy needs the whole URL of a request that it does not tunnel.
        forwards = proxy.scheme in ("http", "https") and server.scheme == "http"
        self._prefix = self._server if forwards else server.path or ""
        first = proxy if proxy.host else server
        addresses.add(first.host or "", first.port or _PORTS[first.scheme or "http"])

    def fits(self, config: ServerConfig) -> bool:
        """Return whether a configuration has the same server, proxy and TLS settings, and the same certificates."""
        return self._identity == _identity(config)

    def drop_idle(self) -> None:
        """Close connections that no request uses."""
        self._pools.clear()

    def send(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | None, deadline: Deadline
    ) -> urllib3.BaseHTTPResponse:
        """Send a request and return the response, its body not yet read.

        Each read of the response ends at the deadline, which may be moved meanwhile.
        """
        _local.deadline = deadline
        # ProxyManager.urlopen would join headers of one name.
        return self._pools.connection_from_url(self._server).urlopen(
            method,
            self._prefix + target,
            headers=headers,
            body=body,
            redirect=False,
            assert_same_host=False,
            timeout=urllib3.Timeout(connect=_CONNECT_TIMEOUT, read=deadline.left()),
            preload_content=False,
        )

    def connect(self, deadline: Deadline) -> LimitedSocket:
        """Return a new connection, after its TLS handshake, for another protocol.

        Unlike `send`, it also tunnels to an http:// server through a proxy.
        """
        _local.deadline = deadline
        pool = self._pools.connection_from_url(self._server)
        connection: Any = pool._new_conn()  # urllib3 has no public way to a socket
        connection.timeout = _CONNECT_TIMEOUT
        if pool.proxy:
            server = parse_url(self._server)
            scheme = "https" if pool.proxy.scheme == "https" else "http"
            port = server.port or _PORTS[server.scheme or "http"]
            connection.set_tunnel(server.host, port, pool.proxy_headers, scheme)
        connection.connect()
        return LimitedSocket(connection.sock, deadline)


def _pools(config: ServerConfig, keepalive: Keepalive, addresses: ServerAddresses) -> urllib3.PoolManager:
    if not config.verify:
        # The agent logs it once, and `check` reports it.
        urllib3.disable_warnings(InsecureRequestWarning)
    options: dict[str, Any] = {
        "cert_reqs": "CERT_REQUIRED" if config.verify else "CERT_NONE",
        "ca_certs": config.ca_file,
        "cert_file": config.cert_file,
        "key_file": config.key_file,
        "server_hostname": config.tls_server_name,
        "maxsize": _MAX_IDLE,
        "retries": False,
        "socket_options": keepalive.options(),
    }
    proxy = config.proxy or ""
    socks = parse_url(proxy) if proxy.lower().startswith(SOCKS) else None
    pools = urllib3.PoolManager(**options)
    if proxy and not socks:
        user, password = user_of(proxy)
        headers = make_headers(proxy_basic_auth=f"{user}:{password}") if user else None
        pools = urllib3.ProxyManager(proxy, proxy_headers=headers, **options)
    pools.pool_classes_by_scheme = _pool_classes(addresses, socks)
    return pools


def _identity(config: ServerConfig) -> tuple[object, ...]:
    """Return all that distinguishes connections. Files may change in place, so their contents count."""
    return (config, *map(_digest, (config.ca_file, config.cert_file, config.key_file)))


def _digest(path: str | None) -> bytes:
    try:
        return hashlib.sha256(Path(path).read_bytes()).digest() if path else b""
    except OSError:
        return b""  # the connection reports it


class _LimitedConnection:
    """Connect, through a SOCKS proxy if there is one, before the deadline of the exchange that this thread begins."""

    addresses: ServerAddresses
    socks: Url | None

    def _new_conn(self: Any) -> socket.socket:
        deadline: Deadline = _local.deadline
        error: Exception = OSError("the name has no address")
        for family, kind, protocol, _, address in self._resolve():
            try:
                connection = socket.socket(family, kind, protocol)
                try:
                    for option in self.socket_options or ():
                        connection.setsockopt(*option)
                    connection.settimeout(deadline.left(self.timeout))
                    connection.connect(address)
                    if self.socks:
                        limited, login = LimitedSocket(connection, deadline), user_of(self.socks.url)
                        request_connection(limited, self._dns_host.strip("[]"), self.port, *login)
                    connection.settimeout(deadline.left(_HANDSHAKE_TIMEOUT))
                except (OSError, Failure):
                    connection.close()
                    raise
                return connection
            except OSError as failed:
                error = failed
        if isinstance(error, TimeoutError):
            deadline.left()
            raise ConnectTimeoutError(self, f"connecting to {self.host} timed out") from error
        raise NewConnectionError(self, f"connecting to {self.host} failed: {error}") from error

    def _resolve(self: Any) -> list[Any]:
        """Resolve the name of the server, or of the SOCKS proxy."""
        host, port = self._dns_host, self.port
        if self.socks:
            host, port = self.socks.host, self.socks.port or _PORTS[self.socks.scheme]
        try:
            found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            raise NameResolutionError(host, self, error) from error
        for *_, address in found:
            self.addresses.add(address[0], port)
        return found

    def request(self: Any, *arguments: Any, **options: Any) -> None:
        super().request(*arguments, **options)  # type: ignore[misc]
        _local.deadline.expect("response from")

    def connect(self: Any) -> None:
        try:
            super().connect()  # type: ignore[misc]
        except TimeoutError as error:  # of the TLS handshake, or of a proxy
            _local.deadline.left()
            raise ConnectTimeoutError(self, f"connecting to {self.host} timed out") from error


class _LimitedResponse(http.client.HTTPResponse):
    """A response whose reads end at the deadline of the exchange that this thread begins."""

    def __init__(self, connection: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(connection, *arguments, **options)
        reader = _Reader(self.fp.detach(), connection, _local.deadline)
        self.fp = io.BufferedReader(reader, _PIECE)


class _Reader(io.RawIOBase):
    """Read what a connection receives until a deadline; or, unless it `waits`, what has arrived."""

    def __init__(self, received: io.RawIOBase, connection: socket.socket, deadline: Deadline) -> None:
        self._received, self.connection, self._deadline = received, connection, deadline
        self.waits, self.ended = True, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self.connection.settimeout(self._deadline.left() if self.waits else 0.0)
        try:
            count: int | None = self._received.readinto(buffer)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except TimeoutError:
            self._deadline.left()
            raise
        self.ended = count == 0
        return count

    def close(self) -> None:
        super().close()
        self._received.close()


def arrives(response: urllib3.BaseHTTPResponse, seconds: float) -> bool:
    """Return whether a part of the body or its end arrives within `seconds`. Raises OSError."""
    text: io.BufferedReader | None = response._fp.fp  # type: ignore[attr-defined]  # urllib3 has no public way
    if text is None:  # the body has ended
        return True
    reader: Any = text.raw
    end = time.monotonic() + seconds
    poll = select.poll()
    poll.register(reader.connection, select.POLLIN)
    reader.waits = False
    try:
        # Bytes that TLS or the buffer holds are not in the socket any more: read before waiting.
        while not text.peek(1) and not reader.ended:
            left = end - time.monotonic()
            if left <= 0:
                return False
            poll.poll(math.ceil(1000 * left))
    finally:
        reader.waits = True
    return True


def _pool_classes(known: ServerAddresses, proxy: Url | None) -> dict[str, type[HTTPConnectionPool]]:
    class Connection(_LimitedConnection, HTTPConnection):
        addresses, socks, response_class = known, proxy, _LimitedResponse

    class TlsConnection(_LimitedConnection, HTTPSConnection):
        addresses, socks, response_class = known, proxy, _LimitedResponse

    class Pool(HTTPConnectionPool):
        ConnectionCls = Connection

    class TlsPool(HTTPSConnectionPool):
        ConnectionCls = TlsConnection

    return {"http": Pool, "https": TlsPool}
