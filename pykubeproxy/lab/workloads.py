"""The programs in the lab's pods: a server that identifies itself, and a small reverse proxy.

Both run as a file and import only the standard library, so that a pod starts fast. Each change of readiness is one
line on standard output: "ready" or "unready".
"""

import argparse
import contextlib
import http.client
import itertools
import json
import signal
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

SLICES = "/apis/discovery.k8s.io/v1"
TIMEOUT = 1.0


def log(text: str) -> None:
    """Write a line with the time of day to standard error."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def report_ready(ready: bool) -> None:
    """Tell the lab that the container is ready or unready."""
    sys.stdout.write("ready\n" if ready else "unready\n")
    sys.stdout.flush()


class HttpServer(socketserver.ThreadingTCPServer):
    """A dual-stack HTTP server with a thread for each connection."""

    address_family = socket.AF_INET6
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, port: int, answer: Callable[["HttpHandler"], tuple[int, bytes]]) -> None:
        super().__init__(("::", port), HttpHandler)
        self.answer = answer
        threading.Thread(target=self.serve_forever, daemon=True).start()


class HttpHandler(BaseHTTPRequestHandler):
    """A request, for which the server's `answer` returns status and body."""

    server: HttpServer
    protocol_version = "HTTP/1.1"  # keep connections open if the client does
    wbufsize = -1  # send headers and body in one packet

    def do_GET(self) -> None:
        status, body = self.server.answer(self)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815

    @property
    def client(self) -> str:
        return plain(self.client_address[0])

    def log_request(self, *_: object) -> None:
        """Log nothing."""


def plain(address: str) -> str:
    """Return a dual-stack socket's peer address in its usual form."""
    return address.removeprefix("::ffff:")


class PodServer:
    """Answers on TCP (HTTP) and UDP with the pod's name and the client's address, as JSON.

    GET  /          {"pod": NAME, "client": ADDRESS, "real_ip": the X-Real-IP header}, also on other paths
    GET  /ready     200 while ready, else 503
    POST /ready     become ready
    POST /unready   become unready, but keep answering
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready = True

    def answer(self, request: HttpHandler) -> tuple[int, bytes]:
        """Return status and body for a request."""
        if request.command == "POST" and request.path in ("/ready", "/unready"):
            self.ready = request.path == "/ready"
            report_ready(self.ready)
        status = 503 if request.path == "/ready" and not self.ready else 200
        return status, self.body(request.client, request.headers.get("X-Real-IP", ""))

    def body(self, client: str, real_ip: str = "") -> bytes:
        """Return the JSON answer to a client."""
        return json.dumps({"pod": self.name, "client": client, "real_ip": real_ip}).encode() + b"\n"

    def serve_datagrams(self, bound: socket.socket) -> None:
        """Answer every datagram; an unreachable client gets no answer."""
        while True:
            with contextlib.suppress(OSError):
                _, client = bound.recvfrom(2048)
                bound.sendto(self.body(plain(client[0])), client)

    def run(self, port: int, linger: float) -> None:
        """Serve until SIGTERM, then for `linger` seconds."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # inherited by the threads, for sigwait
        datagrams = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        datagrams.bind(("::", port))
        threading.Thread(target=self.serve_datagrams, args=(datagrams,), daemon=True).start()
        HttpServer(port, self.answer)
        report_ready(True)
        signal.sigwait({signal.SIGTERM})
        time.sleep(linger)


class Proxy:
    """A reverse proxy that watches the EndpointSlices of one Service (NAMESPACE/NAME) and connects to its pods.

    As an ingress controller it uses the ready endpoints. As an external load balancer it applies changes after
    `delay` seconds and, with `before_ready`, uses pods before they are ready, since their readiness gate waits for
    it. It forwards GET requests round robin with the client's address as X-Real-IP, and logs each added and removed
    address.
    """

    def __init__(self, service: str, delay: float = 0.0, before_ready: bool = False) -> None:
        self.service = service
        self.delay = delay
        self.before_ready = before_ready
        self._slices: dict[str, dict[str, str]] = {}
        self._pods: dict[str, str] = {}
        self._rotation: list[str] = []
        self._turns = itertools.count()
        self._versions = itertools.count(1)
        self._applied = 0
        self._lock = threading.Lock()

    def _uses(self, endpoint: dict[str, Any]) -> bool:
        conditions = endpoint.get("conditions", {})
        if self.before_ready:
            return not conditions.get("terminating")
        return bool(conditions.get("ready", True))

    def slice_changed(self, kind: str, slice_: dict[str, Any]) -> None:
        """Apply a watch event of an EndpointSlice."""
        pods = {}
        if kind != "DELETED" and slice_["addressType"] == "IPv4":
            port = slice_["ports"][0]["port"]
            pods = {
                f"{endpoint['addresses'][0]}:{port}": endpoint["targetRef"]["name"]
                for endpoint in slice_["endpoints"]
                if self._uses(endpoint)
            }
        self._slices[slice_["metadata"]["name"]] = pods
        before = self._pods
        self._pods = {address: pod for part in self._slices.values() for address, pod in part.items()}
        removed = [f"{address} ({pod})" for address, pod in before.items() if address not in self._pods]
        added = [f"{address} ({pod})" for address, pod in self._pods.items() if address not in before]
        if removed or added:
            log(f"{self.service}: removed {', '.join(removed) or 'none'}; added {', '.join(added) or 'none'}")
            arguments = (next(self._versions), list(self._pods))
            threading.Timer(self.delay, self._rotate, arguments).start()

    def _rotate(self, version: int, addresses: list[str]) -> None:
        with self._lock:
            if version > self._applied:  # timers may fire out of order
                self._applied, self._rotation = version, addresses
                log(f"{self.service}: in rotation: {', '.join(addresses) or 'none'}")

    def next(self) -> str | None:
        """Return the address for the next request, None if there is none."""
        rotation = self._rotation
        return rotation[next(self._turns) % len(rotation)] if rotation else None

    def answer(self, request: HttpHandler) -> tuple[int, bytes]:
        """Forward a request to the next address; return its status and body."""
        address = self.next()
        if address is None:
            return 503, b""
        connection = http.client.HTTPConnection(address, timeout=TIMEOUT)
        try:
            headers = {**request.headers, "X-Real-IP": request.client}
            connection.request(request.command, request.path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            log(f"{self.service}: {address} failed: {error}")
            return 502, b""
        finally:
            connection.close()

    def _watch(self, api: str) -> Iterator[dict[str, Any]]:
        """Yield the events of the Service's slices, starting with ADDED for each, until the connection ends."""
        namespace, _, name = self.service.partition("/")
        query = f"watch=true&labelSelector=kubernetes.io%2Fservice-name%3D{name}"
        connection = http.client.HTTPConnection(api)
        try:
            connection.request("GET", f"{SLICES}/namespaces/{namespace}/endpointslices?{query}")
            for line in connection.getresponse():
                yield json.loads(line)
        finally:
            connection.close()

    def run(self, port: int, api: str) -> None:
        """Serve and watch until killed; `api` is ADDRESS:PORT."""
        HttpServer(port, self.answer)
        report_ready(True)
        while True:
            try:
                for event in self._watch(api):
                    if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                        self.slice_changed(event["type"], event["object"])
            except (OSError, ValueError, http.client.HTTPException) as error:
                log(f"watch ended: {error}")
            time.sleep(0.5)


def main() -> None:
    """Run the program that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="the pod's name, or with --api the Service (NAMESPACE/NAME)")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--linger", type=float, default=0.0, help="seconds to serve after SIGTERM")
    parser.add_argument("--api", metavar="ADDRESS:PORT", help="run as a reverse proxy with this API server")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds until a change takes effect")
    parser.add_argument("--before-ready", action="store_true", help="use pods that are not ready, too")
    options = parser.parse_args()
    if options.api:
        Proxy(options.name, options.delay, options.before_ready).run(options.port, options.api)
    else:
        PodServer(options.name).run(options.port, options.linger)


if __name__ == "__main__":
    main()
