"""Without the extra `node`, pip finds wheels of all requirements, so that nobody needs a compiler on macOS.

`make dist` tries it on Linux.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
# The oldest and the newest supported version; 10.15 is the oldest macOS for which python.org has both.
PYTHONS = ("3.11", "3.14")
SYSTEMS = ("macosx_11_0_arm64", "macosx_10_15_x86_64")
# A package ends its wheels for an old version of Python, or for Intel's processors: either is in one of two pairs.
PAIRS = [*zip(PYTHONS, SYSTEMS, strict=True)]


def resolve(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Let pip find what it would install, from wheels only."""
    options = ["--dry-run", "--quiet", "--ignore-installed", "--only-binary=:all:", f"--target={folder}"]
    command = [sys.executable, "-m", "pip", "install", *options, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip unless pip reaches a package index."""
    if resolve(tmp_path_factory.mktemp("index"), "--no-deps", "--retries=0", "click").returncode:
        pytest.skip("pip reaches no package index")


def test_versions_begin_with_the_oldest_supported_one() -> None:
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(("python", "system"), PAIRS)
def test_all_requirements_have_wheels(python: str, system: str, tmp_path: Path) -> None:
    found = resolve(tmp_path, f"--python-version={python}", f"--platform={system}", *PROJECT["dependencies"])
    assert found.returncode == 0, found.stderr


@pytest.mark.usefixtures("index")
def test_the_extra_needs_a_compiler(tmp_path: Path) -> None:
    """Pip reports a requirement without wheels."""
    found = resolve(tmp_path, f"--platform={SYSTEMS[0]}", *PROJECT["optional-dependencies"]["node"])
    assert "python-iptables" in found.stderr
