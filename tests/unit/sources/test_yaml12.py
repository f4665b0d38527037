"""Scalars as YAML 1.2 reads them."""

import pytest
import yaml

from pykubeproxy.sources import yaml12


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"),
        ("no", "no"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("2026-11-20T23:41:20Z", "2026-11-20T23:41:20Z"),
        ("2026-11-20", "2026-11-20"),
        ("1:30", "1:30"),
        ("010", 10),
        ("08", 8),
        ("0o17", 15),
        ("0x1F", 31),
        ("-7", -7),
        ("1_000", "1_000"),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        ("~", None),
        ("null", None),
        ("", None),
        ("10.0.0.1", "10.0.0.1"),
        ("'5'", "5"),
        ("!!str 5", "5"),
    ],
)
def test_scalar(text: str, value: object) -> None:
    """A plain scalar becomes what Kubernetes' users mean by it."""
    ((_, document),) = yaml12.documents(f"a: {text}\n".encode())
    assert document == {"a": value}
    assert type(document["a"]) is type(value)


def test_documents_know_their_lines() -> None:
    """Each document comes with the line it starts on; merge keys work."""
    text = b"# first\na: 1\n---\n---\n\nc:\n  d: &x {b: 1}\n  e: {<<: *x}\n"
    assert list(yaml12.documents(text)) == [
        (2, {"a": 1}),
        (4, None),
        (6, {"c": {"d": {"b": 1}, "e": {"b": 1}}}),
    ]


@pytest.mark.parametrize(
    "text",
    [
        b"a: [",
        b"a: !Ref x",
        b"a: !!timestamp x",
        b"a: !!bool x",
        b"a: !!int 0xg",
        b"a: *b",
        b"\x01",
        b"? [a]\n: b",
    ],
)
def test_no_yaml(text: bytes) -> None:
    """Whatever is wrong is one kind of error."""
    with pytest.raises(yaml.YAMLError):
        list(yaml12.documents(text))


@pytest.mark.parametrize("text", [b"[" * 100_000 + b"]" * 100_000, b"- " * 100_000, b"{a: " * 100_000])
def test_deep_nesting_is_refused(text: bytes) -> None:
    """Text that would overrun the stack of the loader in C is an error, not the end of the process."""
    with pytest.raises(yaml.YAMLError, match="nested too deeply"):
        list(yaml12.documents(text))
