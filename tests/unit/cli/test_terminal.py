"""Foreign text cannot control a terminal, forge a log line, or leak secrets into it."""

import io
import json
import sys
from collections.abc import Callable, Iterator

import click
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy.cli import logs, terminal
from pykubeproxy.cli.emit import echo_json
from pykubeproxy.config import LogFormat
from pykubeproxy.wording import printable, styled, text_of

HOSTILE = [
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\x1b[8mhidden\x1b[0m",
    "\x9b31m",
    "a\rb",
    "\u202eesrever",
    "\udcff",
    "\x1bP1;2q",
    "\u2028",
    "a\nError: forged",
    "a\u200bb",  # zero width
    "a\u2066b",
    "\ufeff",
    "\U000e0041",  # a tag, invisible
]


@pytest.fixture
def logged(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """Gives what was logged; structlog is as before afterwards."""
    before = structlog.get_config()
    yield lambda: capsys.readouterr().err
    structlog.configure(**before)


@given(st.text())
def test_printable_is_idempotent(text: str) -> None:
    """The result is one line, stable, encodable and keeps all printable text."""
    shown = printable(text)
    assert shown.isprintable() and printable(shown) == shown
    shown.encode()
    assert "".join(filter(str.isprintable, text)) in shown or "\\" in shown


@pytest.mark.parametrize("text", HOSTILE)
def test_only_own_styles_and_line_breaks_reach_a_report(text: str) -> None:
    """Foreign text within and beside styled text is escaped; it can begin no line."""
    shown = text_of([styled(text, "red", bold=True), f"b {text}"], [text])
    escaped = printable(text)
    assert escaped.isprintable() and "\\" in escaped
    assert shown == f"\x1b[31m\x1b[1m{escaped}\x1b[0m\nb {escaped}\n\n{escaped}\n"


def test_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """click prints through the guard; a second call changes nothing."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())
    out = sys.stdout
    terminal.guard()
    terminal.guard()
    click.echo("a\x1b]0;title\x07b\tc")
    terminal.echo_styled(text_of([styled("d", "red")]))
    terminal.echo_line("e\nError: f")
    assert isinstance(out, io.StringIO)
    assert out.getvalue() == "a\\x1b]0;title\\x07b\tc\nd\ne\\nError: f\n"
    terminal.clear()
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("text", [*HOSTILE, "a\n2026-01-01T00:00:00Z [info ] forged"])
def test_log_entry_is_one_line(logged: Callable[[], str], text: str) -> None:
    """Line breaks in the event or a value are escaped."""
    logs.set_up(LogFormat.TEXT)
    structlog.get_logger().warning(text, value=text, spaced=f"a {text}", several=[text])
    line = logged()
    assert line.endswith("\n")
    assert line.removesuffix("\n").isprintable()


@pytest.mark.parametrize("text", HOSTILE)
def test_traceback_with_foreign_text_controls_no_terminal(logged: Callable[[], str], text: str) -> None:
    """A traceback has several lines, and only these breaks and no colours of others."""
    logs.set_up(LogFormat.TEXT)
    try:
        raise ValueError(text)
    except ValueError:
        structlog.get_logger().exception("it failed")
    assert all(map(str.isprintable, logged().split("\n")))


@pytest.mark.parametrize("format_", LogFormat)
def test_traceback_shows_no_local_variables(logged: Callable[[], str], format_: LogFormat) -> None:
    """Variables may hold tokens; the traceback still shows where the code failed."""
    logs.set_up(format_)
    token = "s3cr3t" + "t0ken"
    try:
        raise ValueError(f"out of luck with {len(token)} characters")
    except ValueError:
        structlog.get_logger().exception("it failed")
    text = logged()
    assert "out of luck" in text
    assert "test_traceback_shows_no_local_variables" in text
    assert token not in text
    if format_ is LogFormat.JSON:
        assert len([json.loads(line) for line in text.splitlines()]) == 1


@pytest.mark.parametrize("text", HOSTILE)
def test_json_with_control_characters_is_valid(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own escapes come first."""
    echo_json({"text": text})
    shown = capsys.readouterr().out
    assert all(map(str.isprintable, shown.split("\n")))
    assert json.loads(shown) == {"text": text}


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_progress_bar_moves_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard must not escape what moves it."""
    terminal_file = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal.guarded(terminal_file))
    with terminal.progress(2, "Reading nodes") as advance:
        advance()
        advance()
    shown = terminal_file.getvalue()
    assert "Reading nodes" in shown
    assert "2/2" in shown
    assert "\\" not in shown


def test_a_file_gets_no_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with terminal.progress(2, "Reading nodes") as advance:
        advance()
    assert file.getvalue() == ""
