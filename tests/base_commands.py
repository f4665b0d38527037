"""Commands that work without the extra `node`, and those that name it in an error.

`python -m tests.base_commands PROGRAM` runs them with an installation that lacks the extra.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pykubeproxy.config import load
from tests.fakes.cluster import node, server, service, slice_of

_OBJECTS = str(Path(__file__).parent / "data/manifests/explain.yaml")
_HERE = ("--hostname-override", "node1")
SERVER = "SERVER"  # stands for the URL of an API server
_API = ("--master", SERVER, "--hostname-override", "n1")
# Arguments, what the output contains, and the exit status.
WORKING = {
    "version": (("--version",), "pykubeproxy ", 0),
    "help": (("--help",), "explain", 0),
    "help of run": (("run", "--help"), "--cluster-cidr", 0),
    "help of check": (("check", "--help"), "--node-port-range", 0),
    "render": (("render", "-f", _OBJECTS, *_HERE), "-j KUBE-SERVICES", 0),
    "explain files": (("explain", "web", "-f", _OBJECTS, *_HERE), "10.244.1.5:8080  ready", 0),
    "explain API server": (("explain", "web", *_API), "10.244.1.7:8080  ready", 0),
    "diff": (("diff", "-f", _OBJECTS, "--against", "old.yaml", *_HERE), "10.244.2.9", 1),
    "trace": (("trace", "10.244.1.5", "10.96.0.53:53", "-f", _OBJECTS, *_HERE), "10.244.2.9:53", 0),
    "completion": (("completion", "bash"), "complete -o nosort", 0),
    "configuration": (("run", "--write-config-to", "config.yaml", "--cluster-cidr", "10.244.0.0/16"), "", 0),
    "status": (("status", "--url", "http://127.0.0.1:1"), "", 1),
}
# Commands that do something with the node; with the extra, these change nothing.
ON_NODES = {
    "run": ("run", "--config", "missing.yaml"),
    "check": ("check",),
    "cleanup": ("cleanup", "--dry-run"),
    "lab": ("lab", "demo", "--list"),
}
# Commands that read the node's rules.
OF_RULES = {
    "dump-rules": ("dump-rules",),
    "trace": ("trace", "10.244.1.5", "10.96.0.53:53"),
    "diff": ("diff", "-f", _OBJECTS, *_HERE),
}


@contextmanager
def api_server() -> Iterator[str]:
    """Yield the URL of an API server with a Service."""
    with server() as running:
        for it in (node("n1", "10.0.0.1"), service("web", clusterIP="10.96.0.7", clusterIPs=["10.96.0.7"])):
            running.store.create(it)
        running.store.create(slice_of("web", "10.244.1.7"))
        yield running.url


def works(program: Sequence[str], name: str, url: str, folder: Path) -> None:
    """Fail unless a command of WORKING works."""
    arguments, expected, status = WORKING[name]
    (folder / "old.yaml").write_text(Path(_OBJECTS).read_text().replace("10.244.2.9", "10.244.2.8"))
    command = [*program, *(url if it == SERVER else it for it in arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, expected in done.stdout, "Traceback" in done.stderr) == (status, True, False), (
        done
    )
    assert name != "help" or "  lab" not in done.stdout
    assert name != "configuration" or load((folder / "config.yaml").read_bytes(), {})


def fails(program: Sequence[str], arguments: Sequence[str], message: str, status: int = 1) -> None:
    """Fail unless a command ends with one line that contains a message."""
    done = subprocess.run([*program, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1), done
    assert done.stderr.startswith("Error: ") and message in done.stderr, done.stderr


def main(program: str) -> None:
    """Run all commands with an installation without the extra."""
    with tempfile.TemporaryDirectory() as folder, api_server() as url:
        for name in WORKING:
            works([program], name, url, Path(folder))
    for arguments in ON_NODES.values():
        fails([program], arguments, "run pip install 'pykubeproxy[node]'")


if __name__ == "__main__":
    main(sys.argv[1])
