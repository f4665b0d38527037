"""What the image is built with: everything that is needed, in the allowed versions, each file known by its hash."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# By lock file, what it has to satisfy.
LOCKS = {
    "requirements.txt": PROJECT["project"]["dependencies"],
    "requirements-build.txt": [*PROJECT["build-system"]["requires"], *PROJECT["dependency-groups"]["build"]],
}
# An environment marker may stand behind the version.
LOCKED = re.compile(
    r"(?P<name>[\w.-]+)==(?P<version>\S+)( ; [^\\]+)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n"
)


def locked(file: str) -> dict[str, str]:
    """The versions of a lock file by name; each of its lines has to belong to one of them."""
    text = (ROOT / file).read_text()
    found = list(LOCKED.finditer(text))
    assert "".join(it[0] for it in found) == text, f"{file} is not as `make lock` writes it"
    return {canonicalize_name(it["name"]): it["version"] for it in found}


@pytest.mark.parametrize("file", LOCKS)
def test_every_line_has_a_hash(file: str) -> None:
    """There is nothing else in the file, no address of a registry either, and nothing stands there twice."""
    text = (ROOT / file).read_text()
    assert len(locked(file)) == len(LOCKED.findall(text)) > 0
    assert "://" not in text


@pytest.mark.parametrize("file", LOCKS)
def test_versions_are_in_range(file: str) -> None:
    """What pyproject.toml asks for is there, in a version that it allows."""
    versions = locked(file)
    for text in LOCKS[file]:
        wanted = Requirement(text)
        version = versions.get(canonicalize_name(wanted.name))
        assert version, f"{wanted.name} is missing in {file}: run `make lock`"
        assert wanted.specifier.contains(version), f"{file} has {wanted.name} {version}: run `make lock`"


def test_nothing_of_the_tools_is_in_the_image() -> None:
    """The agent runs without what is for developers."""
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
