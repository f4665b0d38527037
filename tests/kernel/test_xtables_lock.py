"""The lock of the legacy tables."""

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pykubeproxy.agent.node_setup import prepare_backend
from pykubeproxy.config import load
from pykubeproxy.kernel import Backend, Runner, open_iptables
from pykubeproxy.kernel import iptables as iptables_module
from pykubeproxy.kernel.errors import LockHeld
from pykubeproxy.kernel.iptables import Tools, lock_options
from pykubeproxy.kernel.runner import protect_lock_file
from pykubeproxy.objects import Family

TEXT = "*nat\n:A - [0:0]\nCOMMIT\n"


@pytest.mark.root
def test_a_held_lock_is_an_error_with_its_holder(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the timeout."""
    monkeypatch.setattr(iptables_module, "LOCK_SECONDS", 1)
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
def test_other_users_cannot_lock_the_file_once_an_agent_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stays the same file, because other programs hold its lock. The kubelet creates it with mode 0644."""
    with tempfile.TemporaryDirectory() as folder:  # `tmp_path` is closed to other users
        Path(folder).chmod(0o755)
        _check_protection(Path(folder) / "xtables.lock", monkeypatch)


def _check_protection(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.touch(0o644)
    monkeypatch.setenv("XTABLES_LOCKFILE", str(file))
    lock = ("flock", "--nonblock", str(file), "true")
    assert subprocess.run(lock, user=65534, extra_groups=()).returncode == 0
    before = file.stat()
    prepare_backend(load(None, {}).config)
    assert file.stat().st_ino == before.st_ino
    refused = subprocess.run(lock, user=65534, extra_groups=(), capture_output=True, text=True)
    assert "Permission denied" in refused.stderr
    assert subprocess.run(lock).returncode == 0


@pytest.mark.root
@pytest.mark.parametrize("kind", ["missing", "link", "device"])
def test_only_a_lock_file_is_protected(tmp_path: Path, kind: str) -> None:
    """Not what a link names, nor /dev/null."""
    target, file = tmp_path / "target", tmp_path / "xtables.lock"
    target.touch(0o644)
    if kind == "link":
        file.symlink_to(target)
        with pytest.raises(OSError, match="symbolic links"):
            protect_lock_file(str(file))
    elif kind == "device":
        os.mknod(file, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        file.chmod(0o666)
        protect_lock_file(str(file))
        assert file.stat().st_mode & 0o777 == 0o666
    else:
        protect_lock_file(str(file))
        assert not file.exists()
    assert target.stat().st_mode & 0o777 == 0o644


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
    installed = Tools(backend, Family.IPV4, "iptables", "iptables-save", "iptables-restore", version)
    assert lock_options(installed) == options
