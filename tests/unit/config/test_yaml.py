"""Scalars, keys, errors and limits of YAML as kubectl and kube-proxy read it."""

import math
from collections.abc import Iterable

import pytest

from pykubeproxy.config import ConfigError, load, yaml
from pykubeproxy.sources.manifests import InvalidManifest, read_manifest
from tests.settings import HEAD

WORDS = {
    True: "y Y yes Yes YES on On ON true True TRUE",
    False: "n N no No NO off Off OFF false False FALSE",
    None: "~ null Null NULL",
}
NUMBERS = {
    "0": 0,
    "-7": -7,
    "+5": 5,
    "010": 8,
    "-017": -15,
    "00": 0,
    "0o17": 15,
    "0O17": 15,
    "08": 8,
    "0x1F": 31,
    "0X1f": 31,
    "-0x1F": -31,
    "0b101": 5,
    "-0b101": -5,
    "1_000": 1000,
    "0x_ff": 255,
    "1_": 1,
    "9223372036854775807": 2**63 - 1,
    "18446744073709551615": 2**64 - 1,
    "18446744073709551616": 2**64,
    "-9223372036854775809": -(2**63),
    "1.5": 1.5,
    "1.": 1,
    "-0.0": 0,
    ".5": 0.5,
    "+.5": 0.5,
    "1e3": 1000,
    "1e20": 10**20,
    "1e21": 1e21,
    "1E-3": 0.001,
    "08.5": 8.5,
    "1_0.5": 10.5,
    ".inf": math.inf,
    "+.INF": math.inf,
    "-.Inf": -math.inf,
}
TEXTS = (
    "tRUE yEs oN nULL nil none 1:30 190:20:30 2026-11-20 2026-11-20T23:41:20Z 10.0.0.1 fe80::1 1.2.3 + . .. -. "
    "0x 0xg 0o8 0b2 0b 1e 1e400 e3 0x1p-2 _1 .5_0 1-2 --1 +-1 5s 0x1ffffffffffffffff .Nan inf nan = 5%"
)


def value(text: str) -> object:
    (document,) = yaml.documents(f"a: {text}\n")
    assert isinstance(document.content, dict)
    return document.content["a"]


def words(table: dict[bool | None, str]) -> Iterable[tuple[str, object]]:
    return ((text, value) for value, texts in table.items() for text in texts.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [*words(WORDS), *NUMBERS.items(), *((text, text) for text in TEXTS.split()), ("", None), ("<<", "<<")],
)
def test_scalars(text: str, expected: object) -> None:
    """Plain scalars have the value that go-yaml v2 gives them, and the type that it has in JSON."""
    assert value(text) == expected
    assert type(value(text)) is type(expected)


@pytest.mark.parametrize("text", [".nan", ".NaN", ".NAN"])
def test_nan(text: str) -> None:
    number = value(text)
    assert isinstance(number, float)
    assert math.isnan(number)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("'5'", "5"),
        ('"yes"', "yes"),
        ("!!str 5", "5"),
        ("!!str on", "on"),
        ("!!float 5", 5),
        ("|\n  on", "on\n"),
    ],
)
def test_quotes_and_tags(text: str, expected: object) -> None:
    """A quoted scalar is text; an explicit tag overrides the resolved type."""
    assert value(text) == expected
    assert type(value(text)) is type(expected)


@pytest.mark.parametrize(
    "text",
    [*TEXTS.split(), *NUMBERS, *(text for text, _ in words(WORDS)), ".nan", "", "<<", "-", "[", "a: b"],
)
def test_dumped_text_is_read_as_text(text: str) -> None:
    (document,) = yaml.documents(yaml.dump({text: text}))
    assert document.content == {text: text}


def test_text_that_is_not_utf8_is_read_back() -> None:
    """Go writes such text in binary too."""
    text = yaml.dump({"path": "/etc/\udcff"})
    assert "!!binary" in text
    assert next(yaml.documents(text)).content == {"path": "/etc/\udcff"}


def test_keys_are_text() -> None:
    """As JSON has them."""
    (document,) = yaml.documents("{on: 1, 2: 2, 1.5: 3, 'no': 4, name: 5}")
    assert document.content == {"true": 1, "2": 2, "1.5": 3, "no": 4, "name": 5}


def test_documents_and_their_lines() -> None:
    """Each document comes with its first line; merge keys work."""
    text = b"# first\na: 1\n---\n---\n\nc:\n  d: &x {b: 1, f: 2}\n  e: {<<: *x, f: 3}\n"
    assert list(yaml.documents(text)) == [
        (2, {"a": 1}, ()),
        (4, None, ()),
        (6, {"c": {"d": {"b": 1, "f": 2}, "e": {"b": 1, "f": 3}}}, ()),
    ]


def test_duplicate_keys_are_found_at_every_depth() -> None:
    """By path; the last one counts, as with kubectl."""
    first, second = yaml.documents("a: 1\nb: {c: 1, d: {e: 1, e: 2}, c: 3}\na: 4\n---\nx: 1\nx: 2\n")
    assert sorted(first.duplicates) == [("a",), ("b", "c"), ("b", "d", "e")]
    assert first.content == {"a": 4, "b": {"c": 3, "d": {"e": 2}}}
    assert second.duplicates == (("x",),)


@pytest.mark.parametrize(
    "text",
    [
        b"a: [",
        b"a: !Ref x",
        b"a: !!timestamp x",
        b"a: !!bool x",
        b"a: !!int 0xg",
        b"a: !!int ''",
        b"a: !!null x",
        b"a: *b",
        b"a: &b [*b]",
        b"<<: &b {<<: *b}",
        b"\x01",
        b"? [a]\n: b",
        b"~: b",
    ],
)
def test_invalid_yaml(text: bytes) -> None:
    with pytest.raises(yaml.YAMLError):
        list(yaml.documents(text))


@pytest.mark.parametrize("text", [b"[" * 100_000 + b"]" * 100_000, b"- " * 100_000, b"{a: " * 100_000])
def test_deep_nesting_is_refused(text: bytes) -> None:
    """Text that would overrun libyaml's stack is an error and does not end the process. PyYAML 6.0.4 has a limit too."""
    with pytest.raises(yaml.YAMLError, match=r"nested too deeply|maximum nesting depth"):
        list(yaml.documents(text))


def tower(first: str, level: str) -> str:
    """Ten levels, each of which names the one below ten times."""
    levels = (f"a{n}: &a{n} " + level.format(",".join([f"*a{n - 1}"] * 10)) + "\n" for n in range(1, 11))
    return f"a0: &a0 {first}\n" + "".join(levels)


BOMBS = {
    "lists": tower("[x]", "[{}]"),
    "mappings": tower("{k: v}", "{{l: [{}]}}"),
    "merges": tower("{k: v}", "{{<<: [{}]}}"),
    "text": f"a: &a {'x' * 1000000}\nb: [{', '.join(['*a'] * 11)}]\n",
    "documents": "---\n" + tower("[x]", "[{}]"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_too_much(name: str) -> None:
    """In manifests and in a configuration file, with the line of the excess."""
    with pytest.raises(
        InvalidManifest, match=r"^x\.yaml:\d+: invalid YAML: its aliases expand to too much data$"
    ):
        read_manifest(BOMBS[name].encode(), "x.yaml")
    with pytest.raises(ConfigError, match="its aliases expand to too much data, line "):
        load(BOMBS[name] + HEAD, {})


def test_moderate_aliases() -> None:
    """Moderate anchors, aliases and merges are accepted, and so is much text without them."""
    long = "kind: Service\nmetadata: {name: a}\nspec: {clusterIP: 10.0.0.1}\nx: " + "y" * 11_000_000
    several = (
        "kind: List\nitems:\n- {kind: Service, metadata: {name: a}, spec: &spec {clusterIP: 10.0.0.1}}\n"
    )
    several += "- {kind: Service, metadata: {name: b}, spec: {<<: *spec, type: NodePort}}\n"
    assert [it.object.key.name for it in read_manifest(several.encode(), "x.yaml").objects] == ["a", "b"]
    assert len(read_manifest(long.encode(), "x.yaml").objects) == 1
