"""The lock files pin all dependencies to allowed versions with hashes."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# The requirements of each lock file.
LOCKS = {
    "requirements.txt": [
        *PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"]["node"],
    ],
    "requirements-build.txt": [*PROJECT["build-system"]["requires"], *PROJECT["dependency-groups"]["build"]],
}
# The version may have an environment marker.
LOCKED = re.compile(
    r"(?P<name>[\w.-]+)==(?P<version>\S+)( ; [^\\]+)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n"
)


def locked(file: str) -> dict[str, str]:
    """Return the versions of a lock file by name; fail on lines of another format."""
    text = (ROOT / file).read_text()
    found = list(LOCKED.finditer(text))
    assert "".join(it[0] for it in found) == text, f"{file} has not the format of `make lock`"
    return {canonicalize_name(it["name"]): it["version"] for it in found}


@pytest.mark.parametrize("file", LOCKS)
def test_every_line_has_a_hash(file: str) -> None:
    """The file has no duplicates and no registry URLs."""
    text = (ROOT / file).read_text()
    assert len(locked(file)) == len(LOCKED.findall(text)) > 0
    assert "://" not in text


@pytest.mark.parametrize("file", LOCKS)
def test_versions_are_in_range(file: str) -> None:
    """Each requirement of pyproject.toml is locked in an allowed version."""
    versions = locked(file)
    for text in LOCKS[file]:
        requirement = Requirement(text)
        version = versions.get(canonicalize_name(requirement.name))
        assert version, f"{requirement.name} is missing in {file}: run `make lock`"
        assert requirement.specifier.contains(version), (
            f"{file} has {requirement.name} {version}: run `make lock`"
        )


def test_image_has_no_development_tools() -> None:
    """requirements.txt has no development tools."""
    tools = {
        "pytest",
        "hypothesis",
        "mypy",
        "ruff",
        "mkdocs",
        "mkdocs-material",
        "hatchling",
        "matplotlib",
        "pip",
    }
    assert not tools & locked("requirements.txt").keys()
