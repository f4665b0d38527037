"""The kubelets of all nodes, for the pods that clients create: these run at once and go as soon as they are deleted.

Such a pod has no process of its own. It must use its node's network, and exec runs commands there.
"""

import os
import select
import threading
from contextlib import suppress
from typing import Self

from pykubeproxy.lab.apiserver.errors import ApiError
from pykubeproxy.lab.apiserver.history import Cursor, Lagging, Stored
from pykubeproxy.lab.apiserver.resources import NODES, PODS, JsonObject
from pykubeproxy.lab.apiserver.store import Store
from pykubeproxy.lab.apiserver.write import decoded, now

#: An annotation of pods whose status somebody else reports.
PUBLISHED = "lab.pykubeproxy/published"


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


class PodEnd:
    """Tells when a pod object is gone, which ends the commands in it. A context manager."""

    def __init__(self, store: Store, pod: JsonObject) -> None:
        self._store = store
        self._meta = pod["metadata"]
        self._cursor = store.watch(PODS)

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when pods change."""
        return self._cursor.fileno()

    def has_come(self) -> bool:
        """Return whether the pod is gone."""
        self._cursor.clear()
        try:
            stored = self._store.read(PODS, self._meta["namespace"], self._meta["name"])
        except ApiError:
            return True
        return bool(decoded(stored)["metadata"]["uid"] != self._meta["uid"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.unwatch(PODS, self._cursor)


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
