"""Durations are read and written as Go does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy.config import durations


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("0s", 0.0),
        ("30s", 30.0),
        ("1m30s", 90.0),
        ("1.5h", 5400.0),
        ("300ms", 0.3),
        (".5s", 0.5),
        ("1.s", 1.0),
        ("15m0s", 900.0),
        ("2h22m", 8520.0),
        ("7us", 0.000007),
        ("7\u00b5s", 0.000007),
        ("7\u03bcs", 0.000007),
        ("1ns", 1e-9),
        ("-5s", -5.0),
        ("+5s", 5.0),
    ],
)
def test_go_durations_are_read(text: str, seconds: float) -> None:
    """Each form that Go's ParseDuration takes gives the seconds it stands for."""
    assert durations.parse(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "5", "s", ".s", "1x", "1 s", "-", "1m-1s", "1s ", "\u0661s", "9" * 30 + "h"]
)
def test_anything_else_is_refused(text: str) -> None:
    """What Go refuses raises ValueError: no unit, no digits, blanks, foreign digits, too long a time."""
    with pytest.raises(ValueError, match="must be a duration"):
        durations.parse(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (1e-9, "1ns"),
        (1.5e-6, "1.5\u00b5s"),
        (0.3, "300ms"),
        (1.0, "1s"),
        (60.0, "1m0s"),
        (90.5, "1m30.5s"),
        (900.0, "15m0s"),
        (86400.0, "24h0m0s"),
        (-2.0, "-2s"),
    ],
)
def test_durations_are_written_as_go_prints_them(seconds: float, text: str) -> None:
    """The text is that of Go's Duration.String."""
    assert durations.render(seconds) == text


# Up to 2**50 ns (13 days) a float holds every nanosecond apart from the next.
@given(st.integers(min_value=-(2**50), max_value=2**50))
def test_what_is_written_reads_back(nanoseconds: int) -> None:
    """Writing a duration and reading it again gives the same seconds."""
    seconds = nanoseconds / 10**9
    assert durations.parse(durations.render(seconds)) == seconds


@given(st.text(alphabet="0123456789.hmnsu\u00b5-+", max_size=12))
def test_any_text_is_a_duration_or_refused(text: str) -> None:
    """No text raises anything but ValueError, and one that is read is written so that it reads the same."""
    try:
        seconds = durations.parse(text)
    except ValueError:
        return
    again = durations.parse(durations.render(seconds))
    assert again == pytest.approx(seconds, rel=1e-15, abs=1e-9)
