"""A pod that greets each TCP connection and answers each datagram with its name, and returns what it receives.

Usage: pod.py NAME. Runs as a script, like the lab's pods.
"""

import select
import socket
import sys

PORT = 8080
_BACKLOG = 4096


def main(name: str) -> None:
    """Serve until killed."""
    greeting = f"{name}\n".encode()
    listener = _bound(socket.SOCK_STREAM)
    listener.listen(_BACKLOG)
    datagrams = _bound(socket.SOCK_DGRAM)
    poll = select.epoll()
    poll.register(listener, select.EPOLLIN)
    poll.register(datagrams, select.EPOLLIN)
    connections: dict[int, socket.socket] = {}
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == listener.fileno():
                _accept(listener, greeting, poll, connections)
            elif descriptor == datagrams.fileno():
                _answer(datagrams, greeting)
            elif not _echo(connections[descriptor]):
                connections.pop(descriptor).close()


def _bound(kind: socket.SocketKind) -> socket.socket:
    made = socket.socket(socket.AF_INET6, kind)
    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("::", PORT))
    made.setblocking(False)
    return made


def _accept(
    listener: socket.socket, greeting: bytes, poll: select.epoll, connections: dict[int, socket.socket]
) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:
            continue  # reset before it was accepted
        connection.setblocking(False)
        try:
            connection.send(greeting)
        except OSError:
            connection.close()
            continue
        connections[connection.fileno()] = connection
        poll.register(connection, select.EPOLLIN)


def _answer(datagrams: socket.socket, greeting: bytes) -> None:
    while True:
        try:
            _, client = datagrams.recvfrom(64)
            datagrams.sendto(greeting, client)
        except BlockingIOError:
            return
        except OSError:
            continue  # an ICMP error for an earlier answer


def _echo(connection: socket.socket) -> bool:
    """Return what was received. Return False if the connection has ended."""
    try:
        received = connection.recv(4096)
        return bool(received) and connection.send(received) > 0
    except BlockingIOError:
        return True
    except OSError:
        return False


if __name__ == "__main__":
    main(sys.argv[1])
