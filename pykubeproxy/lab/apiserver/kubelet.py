"""The kubelets of all nodes: they run the pods that clients create, and commands in pods.

A pod that a client creates runs at once and goes as soon as it is deleted. It has no process of its own. It must use its
node's network, and exec runs commands there. Exec carries the streams and the exit code of a process over a WebSocket, on
the channels of *.channel.k8s.io; each message begins with the number of its channel.
"""

import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import IO, NamedTuple

import msgspec
from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Event, Ping, TextMessage
from wsproto.events import Request as Handshake
from wsproto.utilities import RemoteProtocolError

from pykubeproxy.http import Request, Response
from pykubeproxy.lab.apiserver.read import UrlQuery
from pykubeproxy.lab.apiserver.resources import NODES, PODS, ApiError, JsonObject
from pykubeproxy.lab.apiserver.store import Cursor, Lagging, Store, Stored, decoded, now

#: An annotation of pods whose status somebody else reports.
PUBLISHED = "lab.pykubeproxy/published"
V5, V4 = "v5.channel.k8s.io", "v4.channel.k8s.io"
_STDIN, _STDOUT, _STDERR, _ERROR, _CLOSE = 0, 1, 2, 3, 255
_CHUNK = 32 * 1024
_BUFFER = 128 * 1024  # bytes that wait for a slow process; then the client waits
_POD_CHECK_MILLISECONDS = 200  # the end of a pod ends the commands in it
_CLOSE_SECONDS = 5.0  # for a client to answer the close of the WebSocket


class Kubelet:
    """Follows the pods of a store on a thread, from construction to `stop`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._end = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="kubelet", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        os.eventfd_write(self._end, 1)
        self._thread.join()
        os.close(self._end)

    def _run(self) -> None:
        stopped = False
        while not stopped:
            cursor = self._store.watch(PODS)
            try:
                stopped = self._follow(cursor)
            except Lagging:
                pass  # begin again with the present pods
            finally:
                self._store.unwatch(PODS, cursor)

    def _follow(self, cursor: Cursor) -> bool:
        """Reconcile present and changed pods; return True after `stop`. Raises Lagging."""
        poll = select.poll()
        for descriptor in (cursor.fileno(), self._end):
            poll.register(descriptor, select.POLLIN)
        for stored in cursor.initial:
            self._reconcile(stored)
        while not any(descriptor == self._end for descriptor, _ in poll.poll()):
            cursor.clear()
            _, changes = self._store.changes(PODS, cursor)
            for change in changes:
                if change.new is not None:
                    self._reconcile(change.new)
        return True

    def _reconcile(self, stored: Stored) -> None:
        pod = decoded(stored)
        meta, spec = pod["metadata"], pod["spec"]
        if PUBLISHED in (meta.get("annotations") or {}) or not spec.get("nodeName"):
            return
        with suppress(ApiError):  # the pod is gone or there is no such node
            if "deletionTimestamp" in meta:
                self._store.delete(PODS, stored.namespace, stored.name, uid=meta["uid"], grace=0)
            elif spec.get("hostNetwork") and pod["status"].get("phase") == "Pending":
                node = decoded(self._store.read(NODES, "", spec["nodeName"]))
                status = {"status": running(spec, _addresses(node), now())}
                self._store.merge_patch(PODS, stored.namespace, stored.name, status, part="status")


def running(spec: JsonObject, addresses: list[str], started: str, ready: bool = True) -> JsonObject:
    """Return the status of a pod with these addresses that runs since `started`, a time of the API."""
    conditions = {"PodScheduled": True, "Initialized": True, "ContainersReady": ready, "Ready": ready}
    containers = [
        {
            "name": container["name"],
            "image": container.get("image", ""),
            "imageID": "",
            "ready": ready,
            "started": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": started}},
        }
        for container in spec.get("containers") or ()
    ]
    return {
        "phase": "Running",
        "startTime": started,
        "conditions": [{"type": kind, "status": str(value)} for kind, value in conditions.items()],
        "containerStatuses": containers,
        "podIPs": [{"ip": address} for address in addresses],
        **({"podIP": addresses[0]} if addresses else {}),
    }


def _addresses(node: JsonObject) -> list[str]:
    entries = node["status"].get("addresses") or ()
    return [entry["address"] for entry in entries if entry["type"] == "InternalIP"]


class Streams(NamedTuple):
    """The streams that a client requests."""

    stdin: bool
    stdout: bool
    stderr: bool


class Session:
    """One command and its client. Sending waits for a slow client, so that a fast process does not fill memory."""

    def __init__(
        self, connection: socket.socket, websocket: WSConnection, protocol: str, streams: Streams
    ) -> None:
        connection.settimeout(None)
        self._socket = connection
        self._websocket = websocket
        self._protocol = protocol
        self._first = _STDOUT if streams.stdout else _STDERR if streams.stderr else _ERROR
        self._to_stdin = bytearray()
        self._stdin: IO[bytes] | None = None
        self._stdin_ends = False  # the client has closed the channel
        self._channel: int | None = None  # of a message that is not complete
        self._connected = True

    def open(self, response: bytes) -> None:
        """Send the response to the handshake, and an empty message, which shows the client that it is connected."""
        self._transmit(response)
        self._send(self._first, b"")

    def run(self, received: bytes, process: subprocess.Popen[bytes], is_gone: Callable[[], bool]) -> None:
        """Serve until the process ends, the client leaves or its pod `is_gone`. Then kill the process group."""
        exited = os.pidfd_open(process.pid)
        outputs = {
            pipe.fileno(): channel
            for pipe, channel in ((process.stdout, _STDOUT), (process.stderr, _STDERR))
            if pipe is not None
        }
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            self._stdin = process.stdin
        try:
            self._accept(received)
            while self._connected and not is_gone():
                ready = self._poll([*outputs] or [exited])
                for descriptor in ready & outputs.keys():
                    if data := os.read(descriptor, _CHUNK):
                        self._send(outputs[descriptor], data)
                    else:
                        del outputs[descriptor]
                if self._socket.fileno() in ready:
                    self._read_client()
                self._write_stdin()
                if exited in ready:
                    break
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # until wait() the process id cannot be reused
            code = process.wait()
            os.close(exited)
            for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
                pipe.close()
            self._stdin = None
        self.finish(exit_status(code if code >= 0 else 128 - code))

    def finish(self, status: JsonObject) -> None:
        """Send the status and wait until the client closes the WebSocket."""
        self._send(_ERROR, msgspec.json.encode(status))
        if self._connected:
            self._transmit(self._websocket.send(CloseConnection(1000)))
        self._socket.settimeout(_CLOSE_SECONDS)
        while self._connected:
            self._read_client()

    def _poll(self, descriptors: Sequence[int]) -> set[int]:
        """Wait for the client or one of the descriptors; return those that are ready."""
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        receiving = select.POLLIN if len(self._to_stdin) < _BUFFER else 0
        poll.register(self._socket, select.POLLRDHUP | receiving)
        if self._stdin is not None and self._to_stdin:
            poll.register(self._stdin, select.POLLOUT)
        return {descriptor for descriptor, _ in poll.poll(_POD_CHECK_MILLISECONDS)}

    def _write_stdin(self) -> None:
        if self._stdin is None:
            self._to_stdin.clear()
            return
        try:
            if self._to_stdin:
                del self._to_stdin[: os.write(self._stdin.fileno(), self._to_stdin[:_CHUNK])]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the process reads no more
            self._to_stdin.clear()
            self._stdin_ends = True
        if self._stdin_ends and not self._to_stdin:
            self._stdin.close()
            self._stdin = None

    def _read_client(self) -> None:
        try:
            data = self._socket.recv(_CHUNK)
        except OSError:
            data = b""
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
                self._transmit(self._websocket.send(error.event_hint))
            self._connected = False

    def _handle(self, event: Event) -> None:
        if isinstance(event, Ping) and self._websocket.state is ConnectionState.OPEN:
            self._transmit(self._websocket.send(event.response()))
        elif isinstance(event, CloseConnection):
            if self._websocket.state is ConnectionState.REMOTE_CLOSING:
                self._transmit(self._websocket.send(event.response()))
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
        if self._connected:
            self._transmit(self._websocket.send(BytesMessage(bytes([channel]) + data)))

    def _transmit(self, data: bytes) -> None:
        try:
            while data:
                data = data[self._socket.send(data) :]
        except OSError:
            self._connected = False


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


class Sandbox(NamedTuple):
    """Where the commands of a pod run: `entered` moves the calling thread into the pod's network namespace."""

    environment: Mapping[str, str] | None = None  # None: this process's
    entered: Callable[[], AbstractContextManager[None]] = nullcontext


#: Return where the commands of a pod run. Raises ApiError if no kubelet runs the pod.
Runtime = Callable[[JsonObject], Sandbox]


def no_runtime(pod: JsonObject) -> Sandbox:
    """Refuse all commands, as a server that reaches no kubelet."""
    node = pod["spec"].get("nodeName", "")
    raise ApiError(500, f"error dialing backend: node {node} has no kubelet")


def execute(request: Request, pod: JsonObject, runtime: Runtime, store: Store) -> Response:
    """Answer a request for exec with an upgrade to a WebSocket. Raise a 400, 403 or 500.

    The command ends when `store` no longer has the pod.
    """
    query = UrlQuery(request.query)
    container = container_of(pod, query.text("container"))
    name = pod["metadata"]["name"]
    if not pod["spec"].get("nodeName"):
        raise ApiError(400, f"pod {name} does not have a host assigned")
    command = query.texts("command")
    if not command:
        raise ApiError(400, "you must specify at least one command for the container")
    streams = Streams(query.flag("stdin"), query.flag("stdout"), query.flag("stderr"))
    if not any(streams):
        raise ApiError(400, "you must specify at least 1 of stdin, stdout, stderr")
    if query.flag("tty"):
        raise ApiError(
            400, "this API server offers no terminals; leave out -t, or use `pykubeproxy lab exec`"
        )
    if (pod.get("status") or {}).get("phase") != "Running":
        raise ApiError(500, f'unable to upgrade connection: container not found ("{container}")')
    sandbox = runtime(pod)
    # The last check: kubectl repeats a refused request over SPDY and shows the second answer.
    websocket, protocol = _handshake(request)
    accepted = websocket.send(AcceptConnection(subprotocol=protocol))

    def serve(connection: socket.socket, received: bytes) -> None:
        session = Session(connection, websocket, protocol, streams)
        session.open(accepted)
        try:
            process = _start(command, streams, sandbox)
        except OSError as error:
            session.finish(_start_failure(command, error).status())
        else:
            session.run(received, process, lambda: _is_gone(store, pod))

    return Response(upgrade=serve)


def _is_gone(store: Store, pod: JsonObject) -> bool:
    meta = pod["metadata"]
    try:
        stored = store.read(PODS, meta["namespace"], meta["name"])
    except ApiError:
        return True
    return bool(decoded(stored)["metadata"]["uid"] != meta["uid"])


def container_of(pod: JsonObject, requested: str) -> str:
    """Return the container that a request means. Raise a 400 if it is unknown or ambiguous."""
    name, spec = pod["metadata"]["name"], pod["spec"]
    containers = [one["name"] for one in spec.get("containers") or ()]
    all_containers = [one["name"] for one in spec.get("initContainers") or ()] + containers
    if requested:
        if requested not in all_containers:
            raise ApiError(400, f"container {requested} is not valid for pod {name}")
        return requested
    if len(containers) == 1:
        return str(containers[0])
    choices = " ".join(all_containers)
    raise ApiError(400, f"a container name must be specified for pod {name}, choose one of: [{choices}]")


def _handshake(request: Request) -> tuple[WSConnection, str]:
    """Return the WebSocket and the chosen subprotocol."""
    headers = request.headers
    upgrades = [token.strip().lower() for token in headers.get("connection", "").split(",")]
    if "upgrade" not in upgrades or not headers.get("upgrade"):
        raise ApiError(400, "Upgrade request required")
    if headers["upgrade"].lower() != "websocket":
        raise ApiError(
            400,
            f"this API server serves exec over WebSocket, not {headers['upgrade']}; use kubectl 1.31 or later, or `pykubeproxy lab exec`",
        )
    if request.method != "GET":
        raise ApiError(405, "a WebSocket begins with GET")
    websocket = WSConnection(ConnectionType.SERVER)
    try:
        named = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        websocket.initiate_upgrade_connection(named, request.path)
        offered = next(event.subprotocols for event in websocket.events() if isinstance(event, Handshake))
    except RemoteProtocolError as error:
        raise ApiError(400, f"bad WebSocket handshake: {error}") from error
    for protocol in (V5, V4):
        if protocol in offered:
            return websocket, protocol
    names = ", ".join(offered) or "none"
    raise ApiError(403, f"requested protocol(s) are not supported: {names}; supports {V5}, {V4}")


def _start(command: Sequence[str], streams: Streams, sandbox: Sandbox) -> subprocess.Popen[bytes]:
    """Start a command. Raises OSError if it cannot run."""

    def pipe(requested: bool) -> int:
        return subprocess.PIPE if requested else subprocess.DEVNULL

    with sandbox.entered():
        return subprocess.Popen(
            command,
            stdin=pipe(streams.stdin),
            stdout=pipe(streams.stdout),
            stderr=pipe(streams.stderr),
            bufsize=0,
            env=sandbox.environment,
            start_new_session=True,
        )


def _start_failure(command: Sequence[str], error: OSError) -> ApiError:
    """Return the error in the words of containerd."""
    reason = "executable file not found in $PATH" if isinstance(error, FileNotFoundError) else error.strerror
    return ApiError(
        500,
        "Internal error occurred: error executing command in container: failed to exec in container: "
        f'exec: "{command[0]}": {reason}',
    )
