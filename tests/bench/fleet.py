"""Measure `kubectl pykubeproxy` in a generated cluster of 500 nodes: `python -m tests.bench.fleet [NODES [nftables]]`.

Of ten nodes, five run an old kube-proxy, one has stopped following the objects, and one runs in IPVS mode. One node fails
and one never answers. Each has 200 Services with 5 endpoints. With `nftables`, a third of the nodes runs kube-proxy in that
mode. The API server runs in a process of its own, with TLS.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from pykubeproxy.lab.api import Object
from tests.bench.fleet_server import FAILING, HANGING
from tests.fleet import NodeKind, Size, nodes

_PLUGIN = (sys.executable, "-c", "from pykubeproxy.cli.kubectl import main; main()")
_VERDICTS = {NodeKind.FOLLOWS: "follows", NodeKind.STALE: "differs", NodeKind.IPVS: "not compared"}


class Measured(NamedTuple):
    """A command that has ended: its output, exit code, wall and CPU seconds, and its peak of memory in MB."""

    output: str
    code: int
    seconds: float
    cpu_seconds: float
    megabytes: float

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s, {self.cpu_seconds:.1f} s of CPU time, {self.megabytes:.0f} MB"


def main() -> None:
    size = Size(int(sys.argv[1]) if len(sys.argv) > 1 else 500, nftables="nftables" in sys.argv)
    with tempfile.TemporaryDirectory() as folder:
        serve = (sys.executable, "-m", "tests.bench.fleet_server", str(size.nodes), folder)
        mode = ("nftables",) if size.nftables else ()
        with subprocess.Popen((*serve, *mode), stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout
            kubeconfig = server.stdout.readline().strip()
            try:
                diff = _run(folder, kubeconfig, "diff", "-o", "json")
                _check(size, diff)
                print(
                    f"diff, {size.nodes} nodes, {size.services} Services with {size.endpoints} endpoints: {diff}"
                )
                for verb in ("status", "check"):
                    print(f"{verb} of all nodes: {_run(folder, kubeconfig, verb)}")
                explain = _run(folder, kubeconfig, "explain", "default/service0")
                print(f"explain of one Service: {explain}")
                for title, options in (
                    ("from a node to a Service", ("node/node1", "svc/default/service1")),
                    ("from outside to a node port", ("198.51.100.7", "node/node1:30010")),
                    ("from outside to a load balancer, policy Local", ("198.51.100.7", "203.0.113.1:80")),
                ):
                    print(f"trace {title}: {_run(folder, kubeconfig, 'trace', *options)}")
            finally:
                server.terminate()
            print(f"the API server: {float(server.stdout.readline()):.1f} s of CPU time for all of it")


def _run(folder: str, kubeconfig: str, *arguments: str) -> Measured:
    """Run the plugin, and measure it alone."""
    output = Path(folder) / "output"
    command = [*_PLUGIN, *arguments, "--kubeconfig", kubeconfig]
    start = time.monotonic()
    with output.open("w") as written:
        process = subprocess.Popen(command, stdout=written)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds, cpu = time.monotonic() - start, usage.ru_utime + usage.ru_stime
    return Measured(output.read_text(), process.returncode, seconds, cpu, usage.ru_maxrss / 1000)


def _check(size: Size, diff: Measured) -> None:
    """Fail unless each node has its verdict."""
    found = {item["node"]: item for item in msgspec.json.decode(diff.output)["nodes"]}
    for one in nodes(size):
        expected = "not compared" if one.node.name in (FAILING, HANGING) else _VERDICTS[one.kind]
        result: Object = found[one.node.name]
        assert result["verdict"] == expected, result
    assert diff.code == 1, diff.code


if __name__ == "__main__":
    main()
