"""Many watchers and many writers at once."""

import threading
from collections.abc import Callable
from itertools import chain
from typing import Any

from pykubeproxy.lab.apiserver import ENDPOINT_SLICES, ApiServer
from tests.unit.lab.apiserver.conftest import Client, Maker

WATCHERS, WRITERS, CHANGES = 20, 4, 250


def test_each_watcher_gets_each_change_once(
    server: ApiServer, client_of: Callable[[ApiServer], Client], endpoint_slice: Maker, service: Maker
) -> None:
    """20 watchers see each of 1000 changes by 4 writers once, in the order of their versions."""
    start = server.store.version
    path = f"/apis/discovery.k8s.io/v1/endpointslices?watch=1&resourceVersion={start}&timeoutSeconds=60"
    seen: list[list[int]] = [[] for _ in range(WATCHERS)]

    def watch(versions: Any) -> None:
        for event in client_of(server).watch(path):
            versions.append(int(event["object"]["metadata"]["resourceVersion"]))
            if len(versions) == WRITERS * CHANGES:
                return

    written: list[list[int]] = [[] for _ in range(WRITERS)]

    def write(number: int) -> None:
        name = f"s{number}"
        made = server.store.create(endpoint_slice(name, "10.0.0.1"))
        written[number].append(int(made["metadata"]["resourceVersion"]))
        for change in range(CHANGES - 1):
            patch = {"endpoints": [{"addresses": [f"10.0.1.{change}"]}]}
            made = server.store.merge_patch(ENDPOINT_SLICES, "default", name, patch)
            written[number].append(int(made["metadata"]["resourceVersion"]))

    watchers = [threading.Thread(target=watch, args=(versions,), daemon=True) for versions in seen]
    writers = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
    for thread in (*watchers[:10], *writers, *watchers[10:]):  # half of them join while things change
        thread.start()
    for thread in (*writers, *watchers):
        thread.join(60)
    assert all(versions == sorted(chain.from_iterable(written)) for versions in seen)
