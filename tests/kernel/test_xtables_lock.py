"""The lock of the legacy tables."""

import fcntl
import os
import sys
from pathlib import Path

import pytest

from pykubeproxy.kernel import Backend, Runner, open_iptables, tools
from pykubeproxy.kernel.errors import LockHeld
from pykubeproxy.objects import Family

TEXT = "*nat\n:A - [0:0]\nCOMMIT\n"


@pytest.mark.root
def test_a_held_lock_is_an_error_with_its_holder(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the timeout."""
    monkeypatch.setattr(tools, "LOCK_SECONDS", 1)
    legacy = open_iptables(Backend.LEGACY, Family.IPV4, runner)
    with Path(runner.lock_file).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(LockHeld, match=rf"held by process {os.getpid()} \(") as held:
            legacy.restore(TEXT)
    assert Path(sys.executable).name in str(held.value)
    assert runner.lock_file in str(held.value)
    legacy.restore(TEXT)
    assert legacy.legacy_tables() == {"nat"}


@pytest.mark.root
def test_nft_ignores_the_lock(runner: Runner) -> None:
    nft = open_iptables(Backend.NFT, Family.IPV4, runner, seconds=3)
    with Path(runner.lock_file).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        nft.restore(TEXT)


@pytest.mark.parametrize(
    ("backend", "version", "options"),
    [
        (Backend.NFT, (1, 8, 9), ()),
        (Backend.LEGACY, (1, 6, 1), ()),
        (Backend.LEGACY, (1, 6, 2), ("-w", "5", "-W", "100000")),
        (Backend.LEGACY, (1, 8, 7), ("-w", "5", "-W", "100000")),
        (Backend.LEGACY, (1, 8, 8), ("-w", "5")),
    ],
)
def test_wait_options_depend_on_the_version(
    backend: Backend, version: tuple[int, int, int], options: tuple[str, ...]
) -> None:
    installed = tools.Tools(backend, Family.IPV4, "iptables", "iptables-save", "iptables-restore", version)
    assert tools.lock_options(installed) == options
