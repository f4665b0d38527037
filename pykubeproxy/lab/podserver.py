"""The program in each pod: answers on TCP (HTTP) and UDP of one port who it is and whom it sees.

    GET  /          {"pod": NAME, "client": ADDRESS, "real_ip": the X-Real-IP header}, as on any other path
    GET  /ready     200 while ready, else 503
    POST /ready     be ready
    POST /unready   answer on, but say that you are not ready

A UDP datagram is answered with the same JSON. On SIGTERM it goes on answering for the given time and exits.
What a kubelet would want to know ("ready", "unready") it writes to standard output, a word a line.
It uses the standard library alone and is started as a file: a pod has to be there in a blink.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import sys

BACKLOG = 1024


class Pod:
    """The one state of the program: its name and whether it is ready."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready = False

    def say_ready(self, ready: bool) -> None:
        """Change readiness and tell it."""
        self.ready = ready
        sys.stdout.write("ready\n" if ready else "unready\n")
        sys.stdout.flush()

    def seen(self, client: str, real_ip: str) -> bytes:
        """The JSON answer."""
        # An IPv6 socket that takes IPv4 as well would show ::ffff:1.2.3.4; there is one for each here.
        return json.dumps({"pod": self.name, "client": client, "real_ip": real_ip}).encode()

    def answer(self, request: str, client: str) -> tuple[int, bytes]:
        """Status and body for a whole HTTP request head."""
        first, *headers = request.split("\r\n")
        method, _, rest = first.partition(" ")
        path = rest.partition(" ")[0]
        if method == "POST" and path in ("/ready", "/unready"):
            self.say_ready(path == "/ready")
        elif path == "/ready" and not self.ready:
            return 503, b'{"ready": false}'
        real_ip = ""
        for header in headers:
            key, _, value = header.partition(":")
            if key.lower() == "x-real-ip":
                real_ip = value.strip()
        return 200, self.seen(client, real_ip)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One HTTP connection, one request."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            client = writer.get_extra_info("peername")[0]
            status, body = self.answer(head.decode("latin-1"), client)
            writer.write(
                f"HTTP/1.1 {status} {'OK' if status == 200 else 'Service Unavailable'}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the caller went away
        finally:
            writer.close()


def echo(pod: Pod, datagrams: socket.socket) -> None:
    """Answer one datagram."""
    _, peer = datagrams.recvfrom(2048)
    with contextlib.suppress(OSError):  # whom nobody can reach gets no answer
        datagrams.sendto(pod.seen(peer[0], ""), peer)


async def main(name: str, port: int, linger: float) -> None:
    """Serve until told to stop, and `linger` seconds more."""
    pod, loop, stop = Pod(name), asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    for address in ("0.0.0.0", "::"):  # noqa: S104 - a namespace of its own
        await asyncio.start_server(pod.serve, address, port, backlog=BACKLOG)
        kind = socket.AF_INET6 if ":" in address else socket.AF_INET
        datagrams = socket.socket(kind, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        if ":" in address:
            datagrams.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        datagrams.bind((address, port))
        loop.add_reader(datagrams, echo, pod, datagrams)
    pod.say_ready(True)
    await stop.wait()
    await asyncio.sleep(linger)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("name")
    arguments.add_argument("--port", type=int, default=8080)
    arguments.add_argument("--linger", type=float, default=0.0, help="seconds of service after SIGTERM")
    given = arguments.parse_args()
    asyncio.run(main(given.name, given.port, given.linger))
