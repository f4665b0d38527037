"""The Dockerfile pins its sources; `make image` checks the rest."""

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
# An instruction and its arguments.
Step = tuple[str, str]


def steps(text: str) -> list[Step]:
    """The instructions of a Dockerfile, without comments and with continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines if line)]


@pytest.fixture(scope="module")
def stages() -> list[list[Step]]:
    """The two stages, each from its FROM on, after what stands before the first."""
    found: list[list[Step]] = [[]]
    for step in steps((PROJECT / "Dockerfile").read_text()):
        if step[0] == "FROM":
            found.append([])
        found[-1].append(step)
    assert len(found) == 3
    return found


def test_base_is_pinned_by_registry_and_digest(stages: list[list[Step]]) -> None:
    """Both stages start from the same Debian, so that programs built in one run in the other."""
    before, build, final = stages
    (argument,) = (rest for name, rest in before if name == "ARG")
    assert re.fullmatch(r"BASE=docker\.io/library/debian:bookworm-\d{8}-slim@sha256:[0-9a-f]{64}", argument)
    assert (build[0], final[0]) == (("FROM", "${BASE} AS build"), ("FROM", "${BASE}"))


def test_python_packages_are_pinned_by_hash(stages: list[list[Step]]) -> None:
    """pip checks hashes, except when it installs the project's own wheel."""
    commands = [
        command
        for name, rest in stages[1]
        if name == "RUN"
        for command in rest.split("&&")
        if "pip" in command
    ]
    for command in commands:
        if re.search(r"pip (wheel|install)|pip --python \S+ install", command):
            assert "--require-hashes" in command or "--no-deps" in command, command
    for name in ("requirements/node.txt", "requirements/build.txt"):
        for rest in ("".join(step) for step in steps((PROJECT / name).read_text())):
            assert re.match(r"[\w.\-]+(\[\w+\])?==\S+", rest), rest
            assert "--hash=sha256:" in rest, rest
