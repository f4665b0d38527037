"""The queue before standard error: a stalled reader blocks nobody."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
import structlog

from pykubeproxy.cli import logs
from pykubeproxy.cli.logs import LogQueue
from tests.fakes.waiting import PATIENCE, eventually

# More than a pipe holds.
FULL = 1 << 17
# An agent process in miniature: log, then end in different ways.
PROGRAM = """
import sys, structlog
from pykubeproxy.cli import logs, terminal
from pykubeproxy.config import LogFormat
terminal.guard()
logs.queue_stderr()
logs.set_up(LogFormat.TEXT)
log = structlog.get_logger()
"""


class Pipe:
    """A pipe that nobody reads at first, and its writing end as a file."""

    def __init__(self) -> None:
        self.reading, writing = os.pipe()
        self.file: TextIO = os.fdopen(writing, "w", encoding="utf-8")

    def read(self) -> str:
        return os.read(self.reading, 1 << 20).decode()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    os.close(pipe.reading)


def test_texts_are_written_in_order(pipe: Pipe) -> None:
    lines = LogQueue(pipe.file)
    for number in range(2000):
        lines.write(f"{number} ä\ud800\n")
    lines.drain(5)
    assert pipe.read() == "".join(f"{number} ä\\ud800\n" for number in range(2000))
    assert lines.dropped_lines() == 0


def test_a_stalled_reader_blocks_no_writer(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further lines are dropped and counted; one line says so when the reader returns."""
    lines = LogQueue(pipe.file, most_texts=10)
    printer = structlog.WriteLogger(lines)  # type: ignore[arg-type]
    monkeypatch.setattr(
        logs, "log", structlog.wrap_logger(printer, processors=[lambda _, __, event: str(event)])
    )
    lines.write("x" * FULL + "\n")
    eventually(lambda: lines._queue.empty())
    for number in range(100):
        lines.write(f"{number}\n")
    lines.drain(0.2)
    assert lines.dropped_lines() == 90
    text = ""
    while "dropped" not in text:
        text += pipe.read()
    assert text.splitlines()[1:] == [*map(str, range(10)), "{'lines': 90, 'event': 'log lines dropped'}"]
    assert lines.dropped_lines() == 90


def test_lines_that_cannot_be_written_are_counted() -> None:
    with Path("/dev/full").open("w") as file:
        lines = LogQueue(file)
        lines.write("one\ntwo\n")
        lines.drain(5)
        assert lines.dropped_lines() == 2


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + code], capture_output=True, text=True, timeout=PATIENCE
    )


def test_the_last_lines_are_written_before_the_exit() -> None:
    outcome = run("log.error('agent failed', error='no address')\nsys.exit(3)")
    assert outcome.returncode == 3
    assert outcome.stderr.endswith("agent failed error='no address'\n")


def test_a_traceback_follows_the_lines_before_it() -> None:
    outcome = run("log.info('starting')\nraise OSError('unexpected')")
    assert outcome.returncode == 1
    first, *_, last = outcome.stderr.splitlines()
    assert first.endswith("starting")
    assert last == "OSError: unexpected"


@pytest.mark.parametrize("ending", ["sys.exit(3)", "raise OSError('unexpected')"])
def test_a_stalled_reader_does_not_prevent_the_exit(ending: str) -> None:
    """The process waits for a second."""
    reading, writing = os.pipe()
    code = f"for _ in range(5000): log.error('x' * 100)\n{ending}"
    process = subprocess.Popen([sys.executable, "-c", PROGRAM + code], stderr=writing)
    os.close(writing)
    try:
        assert process.wait(PATIENCE) == (3 if "exit" in ending else 1)
    finally:
        process.kill()
        process.wait()
        os.close(reading)
