"""Debug pods: start pods on nodes whose proxies have no usable pod, and remove them when the tables are read.

The name of a pod tells the machine and the process of its command: pykubeproxy-debug-MACHINE-PID-RANDOM. So the next
command removes the pods of a command that was killed.
"""

import hashlib
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

from pykubeproxy.nodes.ending import ENDING, exit_on_signals, handling
from pykubeproxy.objects.pods import Pod
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.failures import Failure, Forbidden, NotFound
from pykubeproxy.sources.pods import ContainerRef, create_pod, delete_pod, get_pod, list_pods

NAMESPACE = "kube-system"
"""The namespace of debug pods: its Pod Security level must be privileged, as for the network of the host."""
_CONTAINER = "debug"
_MADE_BY = re.compile(r"pykubeproxy-debug-([0-9a-f]{8})-([0-9]{1,9})-[0-9a-f]{8}")
_LABELS = {"app.kubernetes.io/name": "pykubeproxy-debug"}
_ROLE = "Role pykubeproxy-debug in manifests/inspect/rbac.yaml grants it"
# Seconds after which the kubelet ends a pod that nobody removed.
_DEADLINE = 600
_START_SECONDS = 60.0
_POLL_SECONDS = 0.5
# Beginnings of reasons for which a container does not start soon.
_HOPELESS = ("ErrImage", "ImagePull", "InvalidImageName", "CreateContainer", "RunContainerError")
_CREATE_SECONDS = 10.0  # for pods that are being created when the command ends


class DebugPods:
    """The debug pods of one command; thread-safe. As a context manager, it removes all that are left at the end.

    `warn` gets a line about each pod that cannot be removed.
    """

    def __init__(self, client: Client, image: str, warn: Callable[[str], None]) -> None:
        self._client, self._image, self._warn = client, image, warn
        self._changed = threading.Condition()
        self._creating: set[str] = set()
        self._created: set[str] = set()
        self._closed = False
        self._signals = ExitStack()

    def __enter__(self) -> Self:
        self._signals.enter_context(exit_on_signals())
        self._remove_abandoned()
        return self

    def _remove_abandoned(self) -> None:
        """Remove the pods that have ended, and those whose command ran on this machine and has ended."""
        labels = ",".join(f"{key}={value}" for key, value in _LABELS.items())
        try:
            for pod in list_pods(self._client, NAMESPACE, labels=labels):
                if (made_by := _MADE_BY.fullmatch(pod.name)) and (
                    pod.finished or _is_abandoned(*made_by.groups())
                ):
                    delete_pod(self._client, NAMESPACE, pod.name)
        except Forbidden:
            pass  # the pods end by themselves
        except Failure as failure:
            self._warn(f"cannot remove debug pods of earlier commands: {failure}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._signals, handling(signal.SIG_IGN, signal.SIGINT, *ENDING):
            with self._changed:
                self._closed = True
                self._changed.wait_for(lambda: not self._creating, _CREATE_SECONDS)
                left = sorted(self._creating | self._created)
            if left:
                with ThreadPoolExecutor(16) as threads:
                    list(threads.map(self._remove, left))

    @contextmanager
    def on(self, node: str, *, entering: bool = False) -> Iterator[ContainerRef]:
        """Run a pod on a node until the end of the context. See `manifest`. Raises Failure."""
        name = f"pykubeproxy-debug-{_machine()}-{os.getpid()}-{secrets.token_hex(4)}"
        with self._changed:
            if self._closed:
                raise Failure("the command is ending")
            self._creating.add(name)
        try:
            self._create(name, manifest(name, node, self._image, entering=entering))
            self._wait(name, node)
            yield ContainerRef(NAMESPACE, name, _CONTAINER)
        finally:
            self._remove(name)

    def _create(self, name: str, pod: Mapping[str, object]) -> None:
        refused = False
        try:
            create_pod(self._client, NAMESPACE, pod)
        except Forbidden as failure:
            refused = True
            raise Forbidden(f"{failure}; {_ROLE}", refused=True) from None
        finally:
            with self._changed:
                self._creating.discard(name)
                if not refused:  # after other failures, the pod may exist
                    self._created.add(name)
                self._changed.notify_all()

    def _wait(self, name: str, node: str) -> None:
        end = time.monotonic() + _START_SECONDS
        while not (pod := get_pod(self._client, NAMESPACE, name)).runs:
            problem = _problem(pod)
            if pod.phase in ("Succeeded", "Failed") or problem.startswith(_HOPELESS):
                raise Failure(f"debug pod with image {self._image} does not run on {node}: {problem}")
            if time.monotonic() > end:
                limit = f"{_START_SECONDS:.0f} s"
                raise Failure(
                    f"debug pod with image {self._image} is not up on {node} after {limit}: {problem}"
                )
            time.sleep(_POLL_SECONDS)

    def _remove(self, name: str) -> None:
        """Remove a pod, even if another thread is removing it: the program may end before that thread is done."""
        with self._changed:
            if name not in self._created | self._creating:
                return
        try:
            delete_pod(self._client, NAMESPACE, name)
        except NotFound:
            pass
        except Failure as failure:
            minutes = _DEADLINE // 60
            self._warn(
                f"cannot remove debug pod {NAMESPACE}/{name}: {failure}; it ends by itself within {minutes} minutes"
            )
        with self._changed:
            self._created.discard(name)
            self._creating.discard(name)


def manifest(name: str, node: str, image: str, *, entering: bool = False) -> dict[str, object]:
    """Return a pod that may read the tables of a node, and nothing more. Its image needs sleep and iptables-save.

    With `entering`, the pod may also enter the network namespaces of other pods, which makes it root on the node.
    """
    more = ["SYS_ADMIN", "SYS_PTRACE", "SETUID", "SETGID", "KILL"] if entering else []
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": _LABELS},
        "spec": {
            "nodeName": node,
            "hostNetwork": True,
            **({"hostPID": True} if entering else {}),
            "dnsPolicy": "Default",
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _DEADLINE,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "tolerations": [{"operator": "Exists"}],
            "containers": [
                {
                    "name": _CONTAINER,
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["sleep", str(_DEADLINE)],
                    "securityContext": {
                        "runAsUser": 0,
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN", "NET_RAW", *more]},
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                }
            ],
        },
    }


def _machine() -> str:
    """Return a word for this machine that does not tell its name."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _is_abandoned(machine: str, process: str) -> bool:
    """Return whether a command ran on this machine and has ended."""
    if machine != _machine():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # of another user
    return False


def _problem(pod: Pod) -> str:
    return (
        next((container.problem for container in pod.containers if container.problem), "")
        or pod.reason
        or pod.phase
    )
