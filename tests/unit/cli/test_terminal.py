"""What others wrote cannot act on a terminal, forge a line of the log, or bring secrets into it."""

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
from pykubeproxy.config import LogFormat

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
]


@pytest.fixture
def logged(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """Gives what was logged; structlog is as before afterwards."""
    before = structlog.get_config()
    yield lambda: capsys.readouterr().err
    structlog.configure(**before)


@pytest.mark.parametrize("text", HOSTILE)
def test_escaped(text: str) -> None:
    """Sequences and invisible characters show as what they are."""
    shown = terminal.printable(text).replace("\x1b[0m", "")
    assert shown.isprintable()
    assert "\\" in shown


@given(st.text())
def test_printing_is_safe_twice(text: str) -> None:
    """What comes out stays as it is, can be encoded, and loses nothing that is printable."""
    shown = terminal.printable(text)
    assert terminal.printable(shown) == shown
    shown.encode()
    assert "".join(filter(str.isprintable, text)) in "".join(filter(str.isprintable, shown)) or "\\" in shown


@pytest.mark.parametrize("style", [{"bold": True}, {"dim": True}, {"fg": "red"}, {"fg": "bright_black"}])
def test_our_own_style_stays(style: dict[str, object]) -> None:
    """Also from line to line."""
    text = click.style("a", **style) + "\n\tb"  # type: ignore[arg-type]
    assert terminal.printable(text) == text


def test_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """click writes through the guard, which is put up once however often it is asked for."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())
    out = sys.stdout
    terminal.guard()
    terminal.guard()
    click.echo("a\x1b]0;title\x07b")
    assert isinstance(out, io.StringIO)
    assert out.getvalue() == "a\\x1b]0;title\\x07b\n"
    terminal.clear()
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("text", [*HOSTILE, "a\n2026-01-01T00:00:00Z [info ] forged"])
def test_a_line_of_the_log_is_one_line(logged: Callable[[], str], text: str) -> None:
    """As its message or any of its values."""
    logs.set_up(LogFormat.TEXT)
    structlog.get_logger().warning(text, value=text, spaced=f"a {text}", several=[text])
    line = logged()
    assert line.endswith("\n")
    assert line.removesuffix("\n").isprintable()


@pytest.mark.parametrize("format_", LogFormat)
def test_a_traceback_shows_no_values(logged: Callable[[], str], format_: LogFormat) -> None:
    """Variables may hold tokens; where the code failed is told all the same."""
    logs.set_up(format_)
    token = "s3cr3t" + "t0ken"
    try:
        raise ValueError(f"out of luck with {len(token)} characters")
    except ValueError:
        structlog.get_logger().exception("it failed")
    text = logged()
    assert "out of luck" in text
    assert "test_a_traceback_shows_no_values" in text
    assert token not in text
    if format_ is LogFormat.JSON:
        assert len([json.loads(line) for line in text.splitlines()]) == 1
