"""Versions, lock files, changelog and the tools of pre-commit agree."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import pykubeproxy

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
# The lock files, with the requirements that each has to meet.
LOCKS: dict[str, list[str]] = {
    **PROJECT["dependency-groups"],
    "build": [*PROJECT["build-system"]["requires"], *PROJECT["dependency-groups"]["build"]],
    "node": [*PROJECT["project"]["dependencies"], *EXTRAS["node"]],
    "lab": [entry for entry in EXTRAS["lab"] if not entry.startswith("pykubeproxy[")],
}
# The version may have an environment marker.
LOCKED = re.compile(
    r"(?P<name>[\w.-]+)==(?P<version>\S+)(?: ; [^\\]+)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n"
)


def locked(file: str) -> dict[str, set[str]]:
    """Return the versions in a lock file by name; fail on lines of another format."""
    text = (ROOT / "requirements" / f"{file}.txt").read_text()
    found = list(LOCKED.finditer(text))
    assert "".join(item[0] for item in found) == text, f"{file}.txt has not the format of `make lock`"
    versions: dict[str, set[str]] = {}
    for item in found:
        versions.setdefault(canonicalize_name(item["name"]), set()).add(item["version"])
    return versions


def test_each_extra_and_group_is_locked() -> None:
    assert {path.stem for path in (ROOT / "requirements").iterdir()} == LOCKS.keys()


@pytest.mark.parametrize("file", LOCKS)
def test_versions_are_in_range(file: str) -> None:
    """Each requirement of pyproject.toml is locked in an allowed version."""
    versions = locked(file)
    for text in LOCKS[file]:
        requirement = Requirement(text)
        found = versions.get(canonicalize_name(requirement.name))
        assert found, f"{requirement.name} is missing in {file}.txt: run `make lock`"
        assert any(requirement.specifier.contains(version) for version in found), (
            f"{file}.txt has {requirement.name} {found}: run `make lock`"
        )


def test_each_package_is_locked_once() -> None:
    """The files can be installed together, and none has a development tool of another."""
    names = [name for file in LOCKS for name in locked(file)]
    assert len(names) == len(set(names))


def test_no_package_lacks_another() -> None:
    """Files are installed without resolution."""
    command = [sys.executable, "-m", "pip", "check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
SECTIONS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def test_manifests_use_this_version() -> None:
    """The image tag is the version of the package."""
    content = yaml.safe_load((ROOT / "manifests" / "base" / "kustomization.yaml").read_text())
    assert [image["newTag"] for image in content["images"]] == [pykubeproxy.__version__]


def test_changelog_format() -> None:
    """Versions are sorted, newest first, with dates and only known sections."""
    first, *others = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert first == "[Unreleased]"
    found = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)", other) for other in others]
    assert all(found), others
    versions = [(tuple(map(int, item.groups()[:3])), item[4]) for item in found if item]
    assert versions == sorted(versions, reverse=True)
    for part in re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]:
        sections = re.findall(r"^### (.*)$", part, re.MULTILINE)
        assert sections == [name for name in SECTIONS if name in sections], "each once, in this order"


def test_every_entry_is_a_sentence() -> None:
    """Every entry ends with a period."""
    for entry in re.findall(r"^- (.*(?:\n  .*)*)", CHANGELOG, re.MULTILINE):
        assert entry.endswith("."), entry


def test_hooks_are_make_lint() -> None:
    """The commands are the same, and no hook downloads anything."""
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    (recipe,) = re.findall(r"^lint: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    entries = [hook["entry"] for hook in repository["hooks"]]
    assert entries == [command.rpartition("xargs ")[2] for command in commands]
