"""Where it all takes place: a network namespace for the node, one for everything else, and one to compare with.

    node 10.0.0.11 ── 10.0.0.1 outside: the API server and all pods
    bare 10.0.1.11 ── 10.0.1.1

Outside answers for every address of a pod, and for cluster IPs as well: nothing listens there, so that a connection to
a Service that is not programmed is refused at once.
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pykubeproxy.lab import bodies
from pykubeproxy.lab.api import SLICES, Api, in_namespace
from pykubeproxy.lab.namespaces import Namespace
from pykubeproxy.lab.requirements import require
from pykubeproxy.lab.rundir import RunDirectory
from pykubeproxy.lab.sweep import start_janitor
from tests.bench import work
from tests.bench.connects import Pods
from tests.bench.work import Size

# What connects a node, and the bare one, with outside: the addresses here and there.
_NODE_LINK = tuple(zip(work.NODE_ADDRESSES, ("10.0.0.1", "fd00:10::1"), strict=True))
_BARE_LINK = (("10.0.1.11", "10.0.1.1"), ("fd00:10:1::11", "fd00:10:1::1"))
_API_ADDRESS = "10.0.0.1"
# How long the API server may take to be full, and another process to end, in seconds.
_PATIENCE = 60.0


class Site:
    """The namespaces, of which `bare` never has a rule; `directory` is for files, and is gone with them."""

    def __init__(self, name: str, directory: Path) -> None:
        self.directory = directory
        self._name = name
        self._nodes = 0
        self.outside = Namespace(name, "outside")
        for address, length in work.OUTSIDE:
            self.outside.address("lo", address, length)
        with self.outside.entered():
            self.pods = Pods()
        self.bare = Namespace(name, "bare")
        self._connect(self.bare, "bare", _BARE_LINK)

    def _connect(self, node: Namespace, interface: str, link: tuple[tuple[str, str], ...]) -> None:
        node.cable("eth0", self.outside, interface)
        for own, other in link:
            length = 64 if ":" in own else 24
            node.address("eth0", own, length)
            self.outside.address(interface, other, length)
            node.route("::/0" if ":" in other else "0.0.0.0/0", via=other)

    @contextmanager
    def node(self) -> Iterator[Namespace]:
        """A node on which no rule has ever been written."""
        self._nodes += 1
        node, interface = Namespace(self._name, f"node{self._nodes}"), f"node{self._nodes}"
        try:
            node.forward()
            self._connect(node, interface, _NODE_LINK)
            yield node
        finally:
            with suppress(LookupError):  # it never came to the cable
                self.outside.unplug(interface)
            node.remove()

    @contextmanager
    def cluster(self, size: Size) -> Iterator["Cluster"]:
        """An API server with Services of this size."""
        command = [sys.executable, "-m", "tests.bench.server", str(size), "0.0.0.0"]
        log = self.directory / "apiserver.log"
        with log.open("wb") as errors:
            process = self.outside.spawn(command, output=subprocess.PIPE, errors=errors)
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], _PATIENCE)
            port = process.stdout.readline().strip() if ready else b""
            if not port:
                raise RuntimeError(f"the API server did not start: {log.read_text().strip()}")
            yield Cluster(self, size, int(port))
        finally:
            end(process)

    def close(self) -> None:
        """Let go of everything; the janitor takes it away."""
        self.pods.close()
        self.bare.close()
        self.outside.close()


class Cluster:
    """An API server full of Services, and writes to it."""

    def __init__(self, site: Site, size: Size, port: int) -> None:
        self.size = size
        self.directory = site.directory
        self._api = Api(site.outside.name, _API_ADDRESS, port)
        self.kubeconfig = site.directory / "kubeconfig"
        self.kubeconfig.write_text(bodies.kubeconfig(self._api.url))

    def set_unready(self, service: int, *endpoints: int) -> None:
        """Have these endpoints of a Service (numbers from 0 on) not ready, all others ready."""
        for slice_ in work.slices(self.size, service, endpoints):
            meta = slice_["metadata"]
            path = f"{in_namespace(SLICES, meta['namespace'])}/{meta['name']}"
            self._api.call("PATCH", path, {"endpoints": slice_["endpoints"]})


@contextmanager
def site() -> Iterator[Site]:
    """Build it, and take it away whatever happens. Raises Unmet where that cannot be."""
    require()
    directory = RunDirectory(f"bench{os.getpid()}")
    directory.lock()
    janitor = start_janitor(directory.lab)
    built = None
    try:
        built = Site(directory.lab, directory.path)
        yield built
    finally:
        if built:
            built.close()
        directory.release()
        assert janitor.stdin is not None
        janitor.stdin.close()
        janitor.wait(_PATIENCE)


def end(process: subprocess.Popen[bytes], seconds: float = 15.0) -> None:
    """Ask a process to end, and make it if it does not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def pause_until(moment: float) -> None:
    """Sleep until time.monotonic() has come to `moment`."""
    if (rest := moment - time.monotonic()) > 0:
        time.sleep(rest)
