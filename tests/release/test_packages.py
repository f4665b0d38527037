"""tests/setup/packages.sh installs what is missing and removes nothing."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "setup/packages.sh"


def installed(folder: Path, missing: str, *commands: str) -> list[str]:
    """Run the script where Debian's package `missing` is missing. Return the names of the packages it installs."""
    fakes = {
        "dpkg-query": f'[ "$4" = {missing} ] || printf installed',
        "sudo": 'exec "$@"',
        "apt-get": f'[ "$1" = update ] || echo "$@" >{folder}/log',
        **dict.fromkeys(commands, "true"),
    }
    for name, body in fakes.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    for name in ("bash", "id", "sh"):
        (folder / name).symlink_to(f"/bin/{name}" if name != "id" else "/usr/bin/id")
    subprocess.run(["/bin/bash", SCRIPT], env={**os.environ, "PATH": str(folder)}, check=True)
    log = folder / "log"
    words = log.read_text().split() if log.exists() else []
    return [word for word in words[words.index("install") + 1 :] if not word.startswith("-")] if words else []


@pytest.mark.parametrize("missing", ["podman", "nftables"])
def test_missing_packages_are_installed(tmp_path: Path, missing: str) -> None:
    assert installed(tmp_path, missing, "runc") == [missing]


def test_runc_of_docker_stays(tmp_path: Path) -> None:
    """Debian's runc conflicts with Docker's containerd.io, which has a runc of its own."""
    assert installed(tmp_path, "runc", "runc") == []


def test_runc_is_installed_without_docker(tmp_path: Path) -> None:
    assert installed(tmp_path, "runc") == ["runc"]
