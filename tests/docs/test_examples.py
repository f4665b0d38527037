"""Every `console` example of the documentation does what the page says."""

import itertools
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pykubeproxy.lab import daemon
from tests.docs.pages import Example, blocks, examples, name, pages
from tests.docs.sessions import Session, agrees
from tests.fakes.kubectl import needs_kubectl
from tests.fakes.waiting import PATIENCE

_numbers = itertools.count()


def with_examples() -> list[object]:
    """The pages with examples; those that ask for root are for root, and some need kubectl."""
    found: list[object] = []
    for page in pages():
        consoles = [block for block in blocks(page) if block.language == "console"]
        if consoles:
            commands = [example.command for block in consoles for example in examples(block)]
            marks = [pytest.mark.root] * any("sudo" in command for command in commands)
            marks += [needs_kubectl] * any(re.search("kubectl (?!pykubeproxy)", it) for it in commands)
            found.append(pytest.param(page, id=name(page), marks=marks))
    return found


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    """A folder, and a lab's name that nobody else has; whatever an example left standing goes."""
    lab = f"td{os.getpid()}x{next(_numbers)}"
    yield Session(tmp_path, lab)
    if os.geteuid() == 0:
        daemon.down(lab)


@pytest.mark.parametrize("page", with_examples())
def test_examples(page: Path, session: Session, tmp_path: Path) -> None:
    """The files of the page are written, its commands run in their order, and all of it is as the page has it."""
    for block in blocks(page):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
    consoles = [block for block in blocks(page) if block.language == "console"]
    follow([example for block in consoles for example in examples(block)], page, session)


def follow(shown: Sequence[Example], page: Path, session: Session) -> None:
    """Run what a page shows.

    Where the page sleeps, the next command is asked again until it answers as it ought to: how long that takes is the
    machine's affair.
    """
    deadline = 0.0
    for example in shown:
        if example.command.startswith("sleep "):
            deadline = time.monotonic() + PATIENCE
            continue
        wrong = disagreement(example, session)
        while wrong and time.monotonic() < deadline:
            time.sleep(0.5)
            wrong = disagreement(example, session)
        deadline = 0.0
        assert not wrong, f"{name(page)}:{example.line}: {wrong}"


def disagreement(example: Example, session: Session) -> str:
    """What is different from the page when an example is run, or nothing."""
    status, output = session.run(example.command)
    if status == example.status and (not example.output or agrees(example.output, output)):
        return ""
    shown = "\n".join(example.output)
    return f"$ {example.command}\nexits {status} and prints\n{output}\nwhere the page has\n{shown}"
