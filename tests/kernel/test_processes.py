"""Find processes, listeners, interfaces and capabilities."""

import os
import socket
from pathlib import Path

import pytest

from pykubeproxy.kernel import Runner, addresses, processes, system


@pytest.mark.root
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_listeners(inside: str, runner: Runner, host: str) -> None:
    """Listeners of both families are found; connected sockets are not."""
    runner.run(("ip", "link", "set", "lo", "up"))
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=kind) as server:
        port = server.getsockname()[1]
        with socket.create_connection((host, port)) as client:
            other = client.getsockname()[1]
            (found,) = processes.listeners([port, other])
        assert found.port == port
        assert found.process is not None
        assert found.process.pid == os.getpid()
    assert processes.listeners([port]) == ()


def test_process_by_pid() -> None:
    """A process has its pid and command line."""
    found = processes.process(os.getpid())
    assert found is not None
    assert found.arguments == tuple(Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0"))
    assert processes.process(2**22 + 1) is None


@pytest.mark.root
def test_interfaces(inside: str, runner: Runner) -> None:
    """An interface has a name and a kind."""
    runner.run(("ip", "link", "add", "name", "cni0", "type", "bridge"))
    found = {it.name: it.kind for it in addresses.interfaces()}
    assert (found["lo"], found["cni0"]) == ("", "bridge")


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        ("0000000000000000", set()),
        ("0000000000003000", {"CAP_NET_ADMIN", "CAP_NET_RAW"}),
        ("000001ffffffffff", {"CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_SYS_ADMIN"}),
    ],
)
def test_effective_capabilities(tmp_path: Path, mask: str, names: set[str]) -> None:
    """Effective capabilities count, permitted ones do not."""
    status = tmp_path / "status"
    status.write_text(f"Name:\tx\nCapPrm:\t000001ffffffffff\nCapEff:\t{mask}\nCapBnd:\t000001ffffffffff\n")
    assert system.capabilities(status) == names
