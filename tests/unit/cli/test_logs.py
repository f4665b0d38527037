"""Lines about objects that others change all the time."""

import io
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from pykubeproxy.cli import logs
from pykubeproxy.config import LogFormat
from pykubeproxy.objects import Key


class Log:
    """The log of this process, as JSON."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self._file = io.StringIO()
        monkeypatch.setattr(sys, "stderr", self._file)
        made: list[logs.LimitedLines] = []

        class Limited(logs.LimitedLines):
            def __init__(inner) -> None:  # noqa: N805
                super().__init__(lambda: self.now)
                made.append(inner)

        monkeypatch.setattr(logs, "LimitedLines", Limited)
        logs.set_up(LogFormat.JSON)
        (self.limited,) = made

    def warn(self, namespace: str, name: str, event: str = "invalid values skipped") -> None:
        structlog.get_logger().warning(event, about=Key(namespace, name), reason=name)

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines since the last call."""
        text = self._file.getvalue()
        self._file.seek(0)
        self._file.truncate()
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    made = Log(monkeypatch)
    yield made
    made.limited.summarize()  # else a timer would do so during another test
    structlog.reset_defaults()


def test_a_line_of_any_level_is_written(log: Log) -> None:
    """So no call in the program is without effect."""
    structlog.get_logger().debug("watching")
    assert [it["level"] for it in log.lines()] == ["debug"]


def test_lines_about_one_object_are_limited(log: Log) -> None:
    """Three a minute; then one line has the number of the others. Nothing hides other kinds of lines."""
    for _ in range(1000):
        log.warn("ns", "web")
    log.warn("ns", "web", "service quarantined")
    lines = log.lines()
    assert [it["event"] for it in lines] == ["invalid values skipped"] * 3 + ["service quarantined"]
    assert "about" not in lines[0]
    log.limited.summarize()
    (line,) = log.lines()
    assert (line["event"], line["level"]) == ("similar log lines omitted", "warning")
    assert (line["line"], line["lines"], line["namespaces"]) == ("invalid values skipped", 997, "ns")
    log.limited.summarize()
    assert log.lines() == []
    log.now += 61
    log.warn("ns", "web")
    assert len(log.lines()) == 1


def test_lines_about_one_namespace_are_limited(log: Log) -> None:
    """Those of others are written."""
    for number in range(1000):
        log.warn("hostile", f"s{number}")
    log.warn("victim", "web")
    assert [it["reason"] for it in log.lines()] == [*(f"s{number}" for number in range(20)), "web"]


def test_lines_of_one_kind_are_limited(log: Log) -> None:
    """A hundred, when a fault affects all namespaces; the summary names the worst."""
    for number in range(1000):
        for _ in range(2 if number == 7 else 1):
            log.warn(f"ns{number}", "web")
    assert len(log.lines()) == 100
    log.limited.summarize()
    (line,) = log.lines()
    assert (line["lines"], line["namespaces"].count(",")) == (901, 4)


def test_some_namespaces_hide_no_other_one(log: Log) -> None:
    """A tenant with several namespaces uses half of the lines of a kind at most."""
    for number in range(1000):
        log.warn(f"hostile{number % 10}", f"s{number}")
    log.warn("victim", "web")
    lines = log.lines()
    assert (len(lines), lines[-1]["reason"]) == (51, "web")


def test_a_node_that_comes_and_goes_fills_no_log(log: Log) -> None:
    for _ in range(1000):
        log.warn("", "node1", "node deleted, serving with its last state")
    assert len(log.lines()) == 3
    log.limited.summarize()
    (line,) = log.lines()
    assert (line["lines"], line["namespaces"]) == (997, "")


def test_other_lines_are_not_limited(log: Log) -> None:
    for number in range(1000):
        structlog.get_logger().warning("watch failed", number=number)
    assert len(log.lines()) == 1000


def test_a_summary_follows_without_further_lines(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer writes it."""
    begun: list[float] = []

    class Timer:
        name, daemon = "", False

        def __init__(self, seconds: float, call: object) -> None:
            begun.append(seconds)

        def start(self) -> None:
            """Note nothing: the test calls `summarize`."""

    monkeypatch.setattr(logs.threading, "Timer", Timer)
    for _ in range(10):
        log.warn("ns", "web")
    assert begun == [60.0]
