"""One exec over a WebSocket: carries a process's streams and its exit code on the channels of *.channel.k8s.io.

Each message begins with the number of its channel. One thread moves all data and stops reading from a side while the
other side takes none, so that neither a fast process nor a fast client fills memory.
"""

import os
import select
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, NamedTuple

import msgspec
from wsproto import WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, TextMessage
from wsproto.utilities import RemoteProtocolError

from pykubeproxy.lab.apiserver.kubelet import PodEnd
from pykubeproxy.lab.apiserver.resources import JsonObject

V5, V4 = "v5.channel.k8s.io", "v4.channel.k8s.io"
_STDIN, _STDOUT, _STDERR, _ERROR, _CLOSE = 0, 1, 2, 3, 255
_CHUNK = 32 * 1024
_BUFFER = 128 * 1024  # bytes that wait for a slow client or process; then the other side waits
_CLOSE_SECONDS = 5.0  # for a client to answer the close of the WebSocket


class Streams(NamedTuple):
    """The streams that a client requests."""

    stdin: bool
    stdout: bool
    stderr: bool


class Session:
    """One process and its client. The process has pipes for the requested streams only."""

    def __init__(
        self, connection: socket.socket, websocket: WSConnection, protocol: str, streams: Streams
    ) -> None:
        self._socket = connection
        self._websocket = websocket
        self._protocol = protocol
        self._first = _STDOUT if streams.stdout else _STDERR if streams.stderr else _ERROR
        self._to_client = bytearray()
        self._to_stdin = bytearray()
        self._outputs: dict[int, int] = {}  # descriptor: channel
        self._stdin: IO[bytes] | None = None
        self._stdin_ends = False  # the client has closed the channel
        self._channel: int | None = None  # of a message that is not complete
        self._connected = True
        self._progressed = False
        connection.setblocking(False)

    def run(
        self, response: bytes, received: bytes, process: subprocess.Popen[bytes], pod_end: PodEnd
    ) -> None:
        """Send the response to the handshake, then serve until the process ends, the client leaves or the pod is gone.

        Then kills the process group.
        """
        exited = os.pidfd_open(process.pid)
        try:
            self._open(response)
            self._attach(process)
            self._accept(received)
            while self._connected and (self._outputs or not _readable(exited)):
                if _readable(pod_end.fileno()) and pod_end.has_come():
                    break
                self._move([pod_end.fileno(), *([] if self._outputs else [exited])])
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # until wait() the process id cannot be reused
            code = process.wait()
            os.close(exited)
            for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
                pipe.close()
            self._stdin = None
            self._outputs.clear()
        self._finish(exit_status(code if code >= 0 else 128 - code))

    def fail(self, response: bytes, status: JsonObject) -> None:
        """Send the response to the handshake and the status of a command that cannot start."""
        self._open(response)
        self._finish(status)

    def _open(self, response: bytes) -> None:
        self._to_client += response
        self._send(self._first, b"")  # shows the client that the connection is established

    def _attach(self, process: subprocess.Popen[bytes]) -> None:
        for pipe, channel in ((process.stdout, _STDOUT), (process.stderr, _STDERR)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._outputs[pipe.fileno()] = channel
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            self._stdin = process.stdin

    def _finish(self, status: JsonObject) -> None:
        """Send the status and wait until the client closes the WebSocket."""
        if not self._connected:
            return
        self._send(_ERROR, msgspec.json.encode(status))
        self._to_client += self._websocket.send(CloseConnection(1000))
        deadline = None
        while self._connected and (deadline is None or time.monotonic() < deadline):
            if deadline is None and not self._to_client:
                deadline = time.monotonic() + _CLOSE_SECONDS
            self._move([], None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _move(self, ends: Sequence[int], seconds: float | None = None) -> None:
        """Move what can be moved at once; if that is nothing, wait for one side or for one of the descriptors `ends`."""
        self._progressed = False
        self._read_outputs()
        self._write_stdin()
        self._write_client()
        self._read_client()
        if self._progressed or not self._connected:
            return
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP | self._client_events())
        if len(self._to_client) < _BUFFER:
            for descriptor in self._outputs:
                poll.register(descriptor, select.POLLIN)
        if self._stdin is not None and self._to_stdin:
            poll.register(self._stdin, select.POLLOUT)
        for descriptor in ends:
            poll.register(descriptor, select.POLLIN)
        ready = dict(poll.poll(None if seconds is None else seconds * 1000))
        gone = select.POLLRDHUP | select.POLLHUP | select.POLLERR
        if ready.get(self._socket.fileno(), 0) & gone:
            self._connected = False

    def _client_events(self) -> int:
        receiving = select.POLLIN if len(self._to_stdin) < _BUFFER else 0
        return receiving | (select.POLLOUT if self._to_client else 0)

    def _read_outputs(self) -> None:
        for descriptor, channel in list(self._outputs.items()):
            if len(self._to_client) >= _BUFFER:
                return
            with suppress(BlockingIOError):
                data = os.read(descriptor, _CHUNK)
                self._progressed = True
                if data:
                    self._send(channel, data)
                else:
                    del self._outputs[descriptor]

    def _write_stdin(self) -> None:
        if self._stdin is None:
            self._to_stdin.clear()
            return
        try:
            if self._to_stdin:
                del self._to_stdin[: os.write(self._stdin.fileno(), self._to_stdin[:_CHUNK])]
                self._progressed = True
        except BlockingIOError:
            return
        except BrokenPipeError:  # the process reads no more
            self._to_stdin.clear()
            self._stdin_ends = True
        if self._stdin_ends and not self._to_stdin:
            self._stdin.close()
            self._stdin = None

    def _write_client(self) -> None:
        try:
            while self._to_client:
                del self._to_client[: self._socket.send(self._to_client[:_CHUNK])]
                self._progressed = True
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError:
            self._connected = False

    def _read_client(self) -> None:
        if len(self._to_stdin) >= _BUFFER:
            return
        try:
            data = self._socket.recv(_CHUNK)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError:
            data = b""
        self._progressed = True
        if data:
            self._accept(data)
        else:
            self._connected = False

    def _accept(self, data: bytes) -> None:
        """Interpret bytes of the client."""
        try:
            self._websocket.receive_data(data)
            for event in self._websocket.events():
                self._handle(event)
        except RemoteProtocolError as error:
            if error.event_hint is not None:
                self._to_client += self._websocket.send(error.event_hint)
                self._write_client()
            self._connected = False

    def _handle(self, event: Event) -> None:
        if isinstance(event, Ping) and self._websocket.state is ConnectionState.OPEN:
            self._to_client += self._websocket.send(event.response())
        elif isinstance(event, CloseConnection):
            if self._websocket.state is ConnectionState.REMOTE_CLOSING:
                self._to_client += self._websocket.send(event.response())
                self._write_client()
            self._connected = False
        elif isinstance(event, BytesMessage | TextMessage):
            self._receive(event)

    def _receive(self, message: BytesMessage | TextMessage) -> None:
        """Take a message or a part of one; its first part begins with the channel."""
        data = message.data.encode() if isinstance(message.data, str) else bytes(message.data)
        if self._channel is None:
            if not data:
                return
            self._channel, data = data[0], data[1:]
        if self._channel == _STDIN and self._stdin is not None and not self._stdin_ends:
            self._to_stdin += data
        elif self._channel == _CLOSE and self._protocol == V5 and data == bytes([_STDIN]):
            self._stdin_ends = True
        if message.message_finished:
            self._channel = None

    def _send(self, channel: int, data: bytes) -> None:
        self._to_client += self._websocket.send(BytesMessage(bytes([channel]) + data))


def _readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def exit_status(code: int) -> JsonObject:
    """Return what a kubelet reports about a process that has ended."""
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "reason": "NonZeroExitCode",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }
