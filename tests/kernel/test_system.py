"""Kernel settings, limits, processes, listeners and capabilities."""

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pykubeproxy.kernel import Runner, system


@pytest.mark.root
def test_read_and_write_a_setting(inside: str) -> None:
    """A written value is read back."""
    name = "net/ipv4/conf/all/route_localnet"
    assert system.read_setting(name) == "0"
    system.write_setting(name, 1)
    assert system.read_setting(name) == "1"


def test_missing_setting(tmp_path: Path) -> None:
    """It reads as None; writing it raises, names it and creates no file."""
    assert system.read_setting("net/no/such") is None
    with pytest.raises(system.SettingError, match="net/no/such to 1: No such file"):
        system.write_setting("net/no/such", "1")
    with pytest.raises(system.SettingError):
        system.write_setting("missing", "1", root=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("limits", "expected"), [("100:300", 300), ("200:200", 200), ("1024:9999", 9999)])
def test_open_files_are_raised_to_the_hard_limit(limits: str, expected: int) -> None:
    program = (
        "import resource; from pykubeproxy.kernel import system;"
        "print(system.raise_open_files(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    command = ["prlimit", f"--nofile={limits}", sys.executable, "-c", program]
    hard = limits.partition(":")[2]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output == f"{expected} {expected} {hard}\n"


@pytest.mark.parametrize("hard", [-1, 1 << 20])
def test_open_files_are_not_raised_without_bound(monkeypatch: pytest.MonkeyPatch, hard: int) -> None:
    """An infinite limit is -1; commands inherit the limit."""
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert system.raise_open_files() == 65536
    assert limits == [(65536, hard)]


@pytest.mark.root
def test_invalid_value(inside: str) -> None:
    """A value that the kernel rejects raises with its reason."""
    with pytest.raises(system.SettingError, match="Invalid argument"):
        system.write_setting("net/ipv4/conf/all/route_localnet", "many")


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
            (found,) = system.listeners([port, other])
        assert found.port == port
        assert found.process is not None
        assert found.process.pid == os.getpid()
    assert system.listeners([port]) == ()


def test_process_by_pid() -> None:
    """A process has its pid and command line."""
    found = system.process(os.getpid())
    assert found is not None
    assert found.arguments == tuple(Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0"))
    assert system.process(2**22 + 1) is None


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
