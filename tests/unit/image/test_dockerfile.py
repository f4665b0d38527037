"""The image's recipe: what it is made from is pinned, and what runs holds nothing to build with."""

import re
from pathlib import Path

import pytest

from tests.image import root
from tests.image.dockerfile import Stage, stages

PROJECT = Path(__file__).parents[3]
BUILD_TOOLS = re.compile(r"\b(gcc|libc6-dev|python3-dev|python3-venv|pip)\b")
MACHINES = re.compile(r"amd64|x86_64|arm64|aarch64|--platform")


@pytest.fixture(scope="module")
def both() -> list[Stage]:
    return stages((PROJECT / "Dockerfile").read_text())


def words(stage: Stage) -> str:
    return " ".join(word for step in stage.steps for word in step.arguments)


def test_the_base_is_pinned_by_digest(both: list[Stage]) -> None:
    """Both stages start from the same Debian, so that what is built in one runs in the other."""
    build, final = both
    assert build.base == final.base
    assert re.fullmatch(r"debian:bookworm-\d{8}-slim@sha256:[0-9a-f]{64}", final.base)


def test_what_runs_holds_nothing_to_build_with(both: list[Stage]) -> None:
    """Compiler and pip stay in the first stage; all that comes from there is one environment."""
    build, final = both
    assert BUILD_TOOLS.search(words(build))
    assert not BUILD_TOOLS.search(words(final))
    assert [step.arguments for step in final.all("COPY") if step.source == build.name] == [
        ("/opt/pykubeproxy", "/opt/pykubeproxy")
    ]
    (entry,) = final.all("ENTRYPOINT")
    assert entry.arguments == ("pykubeproxy",)
    assert {"iptables", "kmod", "python3"} <= set(words(final).split())


def test_all_of_pypi_is_pinned_by_hash(both: list[Stage]) -> None:
    """Nothing is installed that no hash was asked for, but the project itself."""
    for command in (word for step in both[0].all("RUN") for word in step.arguments[0].split("&&")):
        if re.search(r"pip (wheel|install)|pip --python \S+ install", command):
            assert "--require-hashes" in command or "--no-deps" in command, command
    for name in ("requirements.txt", "requirements-build.txt"):
        text = re.sub(r"\\\n", "", re.sub(r"^\s*#.*\n", "", (PROJECT / name).read_text(), flags=re.MULTILINE))
        for line in filter(str.strip, text.splitlines()):
            assert re.match(r"[\w.\-]+(\[\w+\])?==\S+ ", line), line
            assert "--hash=sha256:" in line, line


def test_no_processor_is_kept_out(both: list[Stage]) -> None:
    """No step names one."""
    assert not any(MACHINES.search(words(stage)) for stage in both)


def test_the_context_holds_what_is_copied(both: list[Stage], tmp_path: Path) -> None:
    """.dockerignore lets it through, and nothing else."""
    root.context(PROJECT, tmp_path)
    copied = {
        name for stage in both for it in stage.all("COPY") if not it.source for name in it.arguments[:-1]
    }
    assert {it.name for it in tmp_path.iterdir()} == copied
    assert not list(tmp_path.rglob("__pycache__"))


@pytest.mark.parametrize(
    "text",
    [
        "RUN true",
        "FROM a\nRUN --mount=type=cache true",
        "FROM a\nADD a b",
        "FROM a\nCOPY --chown=1 a b",
        "FROM a\nUSER 1",
    ],
)
def test_what_is_not_understood_is_an_error(text: str) -> None:
    """A step is carried out or refused, never passed over."""
    with pytest.raises(ValueError, match=r"not understood|before the first FROM"):
        stages(text)


def test_steps() -> None:
    """Lines are joined, comments left out, and arguments filled in."""
    (stage,) = stages(
        "# c\nARG B=debian:1\nFROM ${B} AS x\nRUN a \\\n  # c\n    && b\nENV A=1 B='2 3'\nCOPY --from=y /a /b/\n"
    )
    assert (stage.base, stage.name) == ("debian:1", "x")
    assert [step.arguments for step in stage.steps] == [("a  && b",), ("A=1", "B=2 3"), ("/a", "/b/")]
    assert stage.steps[2].source == "y"
