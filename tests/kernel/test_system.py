"""Read and write kernel settings."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from pykubeproxy.kernel import system


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
