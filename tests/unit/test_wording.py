"""Shared English."""

import pytest

from pykubeproxy.wording import counted, listed, period, plural, suggestion, tied, wrapped


def test_listed() -> None:
    """Lists end with "and"; beyond the limit they are cut."""
    assert listed("abcde", 4) == "a, b, c, d and 1 more"
    assert listed("abcd", 4) == listed("abcd") == "a, b, c and d"
    assert (listed("ab"), listed("a"), listed("")) == ("a and b", "a", "")


def test_plurals() -> None:
    """One is singular, everything else plural."""
    assert [counted(n, "chain") for n in (0, 1, 2)] == ["0 chains", "1 chain", "2 chains"]
    assert (plural(1, "process"), plural(2, "process")) == ("process", "processes")


@pytest.mark.parametrize(
    ("seconds", "text"), [(10800, "3 h"), (5400, "90 min"), (61, "61 s"), (86400, "1 d")]
)
def test_period(seconds: int, text: str) -> None:
    """The unit is the largest that needs no fraction."""
    assert period(seconds) == text


def test_wrapped() -> None:
    """Lines have their indents; tied words stay together, long words whole."""
    assert wrapped(f"a {tied('node port 1')} b", "- ", "  ", width=13) == ["- a", "  node port 1", "  b"]
    assert wrapped("x" * 20, width=10) == ["x" * 20]
    assert wrapped("") == []


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("web2", ["default/web", "default/api"], "did you mean default/web?"),
        ("default/web", ["shop/web", "default/other"], "did you mean shop/web?"),
        ("b/wbe", ["a/web", "b/web"], "did you mean b/web or a/web?"),
        ("scal", ["scale", "time-out"], "did you mean scale?"),
        ("web-9", ["web-3", "web-1", "web-2"], "did you mean web-1, web-2 or web-3?"),
        ("zzz", ["default/web"], ""),
    ],
)
def test_suggestions(name: str, known: list[str], expected: str) -> None:
    assert suggestion(name, known) == expected
