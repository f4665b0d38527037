"""A small reverse proxy that follows the EndpointSlices of one Service and goes to the pods directly.

As an ingress controller it stands in a pod and takes what is ready. As an outside balancer (`--delay`,
`--before-ready`) it takes up changes late, and pods before they are ready, since their readiness waits for
it. Requests go round robin; the caller's address goes along as X-Real-IP. Its log, on standard error, names
each address that came or went. Standard library alone, started as a file, like the program of the pods.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

SLICES = "/apis/discovery.k8s.io/v1"


def log(text: str) -> None:
    """A line with the time of day."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


class Proxy:
    """Where requests go: the addresses in rotation, of those that the slices name."""

    def __init__(self, service: str, delay: float, before_ready: bool) -> None:
        self.service = service
        self.delay = delay
        self.before_ready = before_ready
        self._slices: dict[str, dict[str, str]] = {}
        self._wanted: dict[str, str] = {}
        self._rotation: list[str] = []
        self._turn = 0

    def _takes(self, endpoint: dict[str, Any]) -> bool:
        conditions = endpoint.get("conditions", {})
        if self.before_ready:
            return not conditions.get("terminating")
        return bool(conditions.get("ready", True))

    def slice_changed(self, kind: str, slice_: dict[str, Any]) -> None:
        """Take one watch event of an EndpointSlice."""
        addresses = {}
        if kind != "DELETED" and slice_["addressType"] == "IPv4":
            port = slice_["ports"][0]["port"]
            addresses = {
                f"{endpoint['addresses'][0]}:{port}": endpoint["targetRef"]["name"]
                for endpoint in slice_["endpoints"]
                if self._takes(endpoint)
            }
        self._slices[slice_["metadata"]["name"]] = addresses
        wanted = {address: pod for part in self._slices.values() for address, pod in part.items()}
        gone = [f"{address} ({pod})" for address, pod in self._wanted.items() if address not in wanted]
        new = [f"{address} ({pod})" for address, pod in wanted.items() if address not in self._wanted]
        self._wanted = wanted
        if gone or new:
            log(f"{self.service}: gone {', '.join(gone) or 'none'}; new {', '.join(new) or 'none'}")
            asyncio.get_running_loop().call_later(self.delay, self._rotate, wanted)

    def _rotate(self, addresses: dict[str, str]) -> None:
        self._rotation = list(addresses)
        log(f"{self.service}: in rotation: {', '.join(self._rotation) or 'none'}")

    def next(self) -> str | None:
        """The address whose turn it is; None when there is none."""
        if not self._rotation:
            return None
        self._turn += 1
        return self._rotation[self._turn % len(self._rotation)]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request: pass it on and the answer back."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            client = writer.get_extra_info("peername")[0]
            writer.write(await self._upstream(head, client))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the caller went away
        finally:
            writer.close()

    async def _upstream(self, head: bytes, client: str) -> bytes:
        address = self.next()
        if address is None:
            return refusal(503, "no endpoint")
        host, _, port = address.rpartition(":")
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), 1.0)
            writer.write(head[:-2] + f"X-Real-IP: {client}\r\n\r\n".encode())
            answer = await asyncio.wait_for(reader.read(), 2.0)
            writer.close()
        except (OSError, TimeoutError) as error:
            log(f"{self.service}: {address} failed: {error}")
            return refusal(502, "endpoint failed")
        return answer or refusal(502, "endpoint closed without an answer")


def refusal(status: int, reason: str) -> bytes:
    """An answer of the proxy's own."""
    return f"HTTP/1.1 {status} {reason}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()


async def watch(api: str, namespace: str, service: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """The events of the Service's slices, the present ones first; ends with the connection."""
    host, _, port = api.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    selector = f"kubernetes.io%2Fservice-name%3D{service}"
    path = f"{SLICES}/namespaces/{namespace}/endpointslices?watch=true&labelSelector={selector}"
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAccept: application/json\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    pending = b""
    try:
        while size := int(await reader.readline(), 16):  # chunked transfer coding
            *lines, pending = (pending + await reader.readexactly(size)).split(b"\n")
            await reader.readexactly(2)
            for line in filter(None, lines):
                event = json.loads(line)
                yield event["type"], event["object"]
    finally:
        writer.close()


async def main(api: str, service: str, port: int, delay: float, before_ready: bool) -> None:
    """Serve, and follow the slices as long as there is an API server."""
    proxy = Proxy(service, delay, before_ready)
    for address in ("0.0.0.0", "::"):  # noqa: S104 - a namespace of its own
        await asyncio.start_server(proxy.serve, address, port, backlog=1024)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        try:
            async for kind, slice_ in watch(api, *service.split("/")):
                if kind in ("ADDED", "MODIFIED", "DELETED"):
                    proxy.slice_changed(kind, slice_)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            log(f"watch ended: {error}")
        await asyncio.sleep(0.5)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--api", required=True, metavar="ADDRESS:PORT")
    arguments.add_argument("--service", required=True, metavar="NAMESPACE/NAME")
    arguments.add_argument("--port", type=int, default=8080)
    arguments.add_argument("--delay", type=float, default=0.0, help="seconds until a change takes effect")
    arguments.add_argument("--before-ready", action="store_true", help="take pods that are not ready, too")
    given = arguments.parse_args()
    asyncio.run(main(given.api, given.service, given.port, given.delay, given.before_ready))
