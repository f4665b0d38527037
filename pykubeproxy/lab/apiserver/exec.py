"""The subresource exec of pods: which container, which streams, and the WebSocket handshake."""

import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection
from wsproto.events import Request as Handshake
from wsproto.utilities import RemoteProtocolError

from pykubeproxy.http import Request, Response
from pykubeproxy.lab.apiserver.errors import ApiError
from pykubeproxy.lab.apiserver.kubelet import PodEnd
from pykubeproxy.lab.apiserver.query import Query
from pykubeproxy.lab.apiserver.resources import JsonObject
from pykubeproxy.lab.apiserver.session import V4, V5, Session, Streams
from pykubeproxy.lab.apiserver.store import Store


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
    query = Query(request.query)
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
        raise ApiError(400, "this API server offers no terminals; leave out tty")
    if (pod.get("status") or {}).get("phase") != "Running":
        raise ApiError(500, f'unable to upgrade connection: container not found ("{container}")')
    sandbox = runtime(pod)
    # The last check: kubectl repeats a refused request over SPDY and shows the second answer.
    websocket, protocol = _handshake(request)
    accepted = websocket.send(AcceptConnection(subprotocol=protocol))

    def serve(connection: socket.socket, received: bytes) -> None:
        session = Session(connection, websocket, protocol, streams)
        with PodEnd(store, pod) as pod_end:
            try:
                process = _start(command, streams, sandbox)
            except OSError as error:
                session.fail(accepted, _start_failure(command, error).status())
            else:
                session.run(accepted, received, process, pod_end)

    return Response(upgrade=serve)


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
        raise ApiError(400, f"this API server serves exec over WebSocket, not {headers['upgrade']}")
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
