"""The pages of the documentation, and the fenced blocks on them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_TITLE = re.compile(r'title="([^"]+)"')
_STATUS = re.compile(r"\s+# exits (\d+)$")
_COMMENT = re.compile(r"(^|\s)#\s.*$")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: the word after the fence, its title or "", and its text without indentation."""

    line: int
    language: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Example:
    """A command of a `console` block, the output that stands under it, and the exit status that it ends with."""

    line: int
    command: str
    output: tuple[str, ...]
    status: int


def pages() -> list[Path]:
    """Every page of ours, and what stands beside the code."""
    return sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


def name(page: Path) -> str:
    """A page's path in the project."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page that say what they are in."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        title = _TITLE.search(found["info"])
        inside = re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        yield Block(
            text.count("\n", 0, found.start()) + 1, found["language"], title[1] if title else "", inside
        )


def examples(block: Block) -> list[Example]:
    """The commands of a `console` block: lines that begin with "$ ", continued while they end with a backslash."""
    found: list[Example] = []
    lines = iter(enumerate(block.text.splitlines(), block.line + 1))
    for number, line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while command.endswith("\\"):
                command = f"{command[:-1].rstrip()} {next(lines)[1].strip()}"
            status = _STATUS.search(command)
            found.append(Example(number, command, (), int(status[1]) if status else 0))
        else:
            assert found, f"line {number} is the output of no command"
            last = found[-1]
            found[-1] = Example(last.line, last.command, (*last.output, line), last.status)
    return found


def commands(text: str) -> Iterator[list[str]]:
    """The commands of an `sh` block, each as its words; pipes, variables and redirections part them."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"\|\|?|&&|;|\$\(|\)", _COMMENT.sub("", line.removeprefix("$ "))):
            try:
                words = shlex.split(part)
            except ValueError:
                continue  # a piece of a quoted script
            if words:
                yield words[1:] if words[0] == "sudo" else words
