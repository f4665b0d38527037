"""Let programs reach the API server as in a pod, with the files of a service account, or with a kubeconfig."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pykubeproxy.lab.api import SERVICES, SLICES, Api, Object, in_namespace
from pykubeproxy.lab.apiserver.server import kubeconfig
from pykubeproxy.lab.machine import RunDirectory, check_requirements, start_janitor
from pykubeproxy.lab.network import Namespace
from tests.bench import server, workload
from tests.bench.connects import Pods
from tests.bench.server import CERTIFICATE, KEY
from tests.bench.workload import Size
from tests.fakes.cluster import write_certificate

# Mount a tmpfs on /run, with the service account and the directory of the benchmark; the machine's own /run stays as it is.
_MOUNTS = """
mount -n -t tmpfs tmpfs /mnt
mkdir -p /mnt/secrets/kubernetes.io/serviceaccount "/mnt/${1#/run/}"
cp "$1"/ca.crt "$1"/token /mnt/secrets/kubernetes.io/serviceaccount/
mount -n --bind "$1" "/mnt/${1#/run/}"
mount -n --move /mnt /run
echo ready
exec cat
"""


def write_credentials(folder: Path, address: str) -> None:
    """Write the API server's certificate for an address, its key, and the token of the service account."""
    write_certificate(folder / CERTIFICATE, folder / KEY, address)
    (folder / "token").write_text("of-the-pod")


class Pod:
    """A mount namespace with the files of a service account. A process holds it until `close`."""

    def __init__(self, directory: Path) -> None:
        entering = ("unshare", "--mount", "--propagation", "private", "sh", "-ec", _MOUNTS, "pod")
        self._holder = subprocess.Popen(
            [*entering, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            raise RuntimeError("the mount namespace of the pod was not created")

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs this one in the pod; its root is that of the pod, as in a chroot."""
        holder = f"/proc/{self._holder.pid}"
        return ["nsenter", f"--mount={holder}/ns/mnt", f"--root={holder}/root", *command]

    def close(self) -> None:
        """End the process that holds the namespace."""
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.wait()
        self._holder.stdout.close()


# The link of the node to the outside: addresses of both ends.
_LINK = tuple(zip(workload.NODE_ADDRESSES, ("10.0.0.1", "fd00:10::1"), strict=True))
_API_ADDRESS = "10.0.0.1"
# Seconds until the API server has all objects, and until another process ends.
_PATIENCE = 60.0


class Testbed:
    """The namespaces; `directory` holds temporary files."""

    def __init__(self, name: str, directory: Path) -> None:
        self.directory = directory
        self._name = name
        self._nodes = 0
        self.outside = Namespace(name, "outside")
        for address, length in workload.OUTSIDE:
            self.outside.address("lo", address, length)
        with self.outside.entered():
            self.pods = Pods()
        write_credentials(directory, _API_ADDRESS)
        self.pod = Pod(directory)

    def _connect(self, node: Namespace, interface: str) -> None:
        node.veth("eth0", self.outside, interface)
        for own, other in _LINK:
            length = 64 if ":" in own else 24
            node.address("eth0", own, length)
            self.outside.address(interface, other, length)
            node.route("::/0" if ":" in other else "0.0.0.0/0", via=other)

    @contextmanager
    def node(self) -> Iterator[Namespace]:
        """Create a node without rules."""
        self._nodes += 1
        node, interface = Namespace(self._name, f"node{self._nodes}"), f"node{self._nodes}"
        try:
            node.forward()
            self._connect(node, interface)
            yield node
        finally:
            with suppress(LookupError):  # it never came to the cable
                self.outside.delete_link(interface)
            node.remove()

    @contextmanager
    def cluster(self, size: Size) -> Iterator["Cluster"]:
        """Start an API server with Services of this size."""
        command = [sys.executable, "-m", "tests.bench.server", str(size), "0.0.0.0", str(self.directory)]
        log = self.directory / "apiserver.log"
        with log.open("wb") as errors:
            process = self.outside.spawn(command, output=subprocess.PIPE, errors=errors)
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], _PATIENCE)
            ports = [int(port) for port in process.stdout.readline().split()] if ready else []
            if not ports:
                raise RuntimeError(f"the API server did not start: {log.read_text().strip()}")
            yield Cluster(self, size, *ports)
        finally:
            end(process)

    def close(self) -> None:
        """Close the namespaces; the janitor deletes them."""
        self.pod.close()
        self.pods.close()
        self.outside.close()


class Cluster:
    """An API server with Services, and writes to it. Proxies use `port`, with TLS.

    `replaced` holds the endpoints of Services that have other addresses than at first.
    """

    def __init__(self, site: Testbed, size: Size, port: int, plain_port: int) -> None:
        self.size = size
        self.directory = site.directory
        self.address, self.port = _API_ADDRESS, port
        self.replaced: dict[int, dict[int, str]] = {}
        self._api = Api(site.outside.name, "127.0.0.1", plain_port)  # it outlives the links of nodes
        self.kubeconfig = site.directory / "kubeconfig"
        url = f"https://{_API_ADDRESS}:{port}"
        self.kubeconfig.write_text(kubeconfig(url, certificate=site.directory / server.CERTIFICATE))

    def requests(self, since: float) -> list[tuple[float, str]]:
        """Return the times and paths of the proxies' requests since a time.monotonic()."""
        lines = (self.directory / server.REQUESTS).read_text().splitlines()
        split = (line.partition(" ") for line in lines)
        return [(float(moment), path) for moment, _, path in split if float(moment) >= since]

    def replace(self, service: int, replaced: Mapping[int, str]) -> None:
        """Give these endpoints of a Service (numbers from 0) other addresses, and all others their own."""
        before = workload.slices(self.size, service, replaced=self.replaced.get(service, {}))
        self.replaced[service] = dict(replaced)
        for old, new in zip(before, workload.slices(self.size, service, replaced=replaced), strict=True):
            if old != new:
                self._api.call("PATCH", _path(SLICES, new), {"endpoints": new["endpoints"]})

    def restore(self) -> None:
        """Give all endpoints their own addresses."""
        for service in [*self.replaced]:
            self.replace(service, {})

    def create(self, *objects: Object) -> None:
        """Create Services or EndpointSlices."""
        for item in objects:
            self._api.call("POST", in_namespace(_LIST[item["kind"]], item["metadata"]["namespace"]), item)

    def delete(self, *objects: Object) -> None:
        """Delete Services or EndpointSlices."""
        for item in objects:
            self._api.delete(_path(_LIST[item["kind"]], item))


_LIST = {"Service": SERVICES, "EndpointSlice": SLICES}


def _path(path: str, item: Object) -> str:
    meta = item["metadata"]
    return f"{in_namespace(path, meta['namespace'])}/{meta['name']}"


@contextmanager
def testbed() -> Iterator[Testbed]:
    """Build the testbed and remove it at the end. Raise LabError if the machine does not support it."""
    check_requirements()
    directory = RunDirectory(f"bench{os.getpid()}")
    directory.lock()
    janitor = start_janitor(directory.lab)
    built = None
    try:
        built = Testbed(directory.lab, directory.path)
        yield built
    finally:
        if built:
            built.close()
        directory.release()
        assert janitor.stdin is not None
        janitor.stdin.close()
        janitor.wait(_PATIENCE)


def end(process: subprocess.Popen[bytes], seconds: float = 15.0) -> None:
    """Terminate a process that leads a session, kill it after a timeout, and kill what it leaves, such as iptables."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    deadline = time.monotonic() + _PATIENCE
    while (left := _session(process.pid)) and time.monotonic() < deadline:
        for number in left:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.1)  # a large transaction in the kernel ends first
    if process.stdout is not None:
        process.stdout.close()


def _session(leader: int) -> list[int]:
    """Return the running processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, OSError):
            if os.getsid(int(entry.name)) == leader and ") Z " not in Path(entry, "stat").read_text():
                found.append(int(entry.name))
    return found


def pause_until(moment: float) -> None:
    """Sleep until time.monotonic() reaches `moment`."""
    if (rest := moment - time.monotonic()) > 0:
        time.sleep(rest)
