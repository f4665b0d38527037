"""YAML as kubectl and kube-proxy read it: the scalar rules of sigs.k8s.io/yaml, which are those of go-yaml v2.

`yes`, `on` and `y` are booleans, 010 is eight, and dates and times such as 1:30 are text.
"""

import collections
import re
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import yaml
from yaml import MarkedYAMLError, YAMLError

if TYPE_CHECKING or not yaml.__with_libyaml__:
    from yaml import SafeLoader as _Base
else:
    from yaml import CSafeLoader as _Base  # ten times as fast

__all__ = ["Document", "MarkedYAMLError", "YAMLError", "documents", "dump", "end_of_first", "resolve"]

# Deeper than any object or configuration; libyaml overflows its stack at some tens of thousands.
_MAX_DEPTH = 200
# The maximum of characters and values that the aliases of one text expand to.
_MAX_ALIASED = 10_000_000
# The most values of a text: those of the objects of 100,000 endpoints. JSON takes less time and memory.
_MAX_VALUES = 3_000_000
# From here on Go writes a number in JSON with an exponent.
_EXPONENT = 1e21

_TAG = "tag:yaml.org,2002:"
_WORDS: Mapping[str, bool | float | None] = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
}
_TAGS = {
    type(None): f"{_TAG}null",
    bool: f"{_TAG}bool",
    int: f"{_TAG}int",
    float: f"{_TAG}float",
    str: f"{_TAG}str",
}
_MERGE = f"{_TAG}merge"
_NODE_TAGS = {yaml.ScalarNode: f"{_TAG}str", yaml.SequenceNode: f"{_TAG}seq", yaml.MappingNode: f"{_TAG}map"}
_INTEGER = re.compile(r"[-+]?(?:0[bB][01]+|0[xX][0-9a-fA-F]+|0[oO]?[0-7]+|0|[1-9][0-9]{0,19})")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")


class Document(NamedTuple):
    """A document: the number of its first line, its dicts, lists and scalars, and the path of each duplicate key."""

    line: int
    content: object
    duplicates: tuple[tuple[str, ...], ...] = ()


def documents(text: str | bytes) -> Iterator[Document]:
    """Yield each document of a text.

    Raises YAMLError for text that is not YAML, is nested too deeply, or whose aliases expand to too much.
    """
    collections.deque(_checked(text), maxlen=0)
    loader = _Loader(text)
    try:
        while loader.check_node() and (node := loader.get_node()):
            duplicates = tuple(_duplicates(node, (), set()))
            yield Document(node.start_mark.line + 1, _construct(loader, node), duplicates)
    finally:
        loader.dispose()


def end_of_first(text: str) -> int:
    """Return the index at which the first document of a text ends. Raises YAMLError as `documents` does."""
    ends = (event.end_mark for event in _checked(text) if isinstance(event, yaml.DocumentEndEvent))
    return next((mark.index for mark in ends if mark), len(text))


def dump(content: object) -> str:
    """Return the YAML text of a document, mappings in their order."""
    return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False))


def resolve(text: str) -> bool | int | float | str | None:
    """Return the value of a plain scalar."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] in "+-0123456789":
        return _number(text.replace("_", ""), text)
    return _number(text, text) if text[0] == "." else text


def _number(plain: str, text: str) -> int | float | str:
    """Return the number, or `text` if it is not a number or out of range."""
    if _INTEGER.fullmatch(plain):
        digits = plain.lstrip("+-")
        is_octal = len(digits) > 1 and digits[0] == "0" and digits[1].isdigit()
        integer = int(plain, 8 if is_octal else 0)
        if -(2**63) <= integer < (2**63 if plain[0] in "+-" else 2**64):
            return integer
    if _FLOAT.fullmatch(plain):
        number = float(plain)
        if abs(number) != float("inf"):
            # Go reads 08 as a float too, and prints it as 8 in JSON.
            return int(number) if plain.isdigit() and number < 2**63 else number
    return text


def _as_json(value: bool | float | str | None) -> bool | int | float | str | None:
    """Return a value as it is after the conversion to JSON, where 1.0 and 1 are one number, written 1."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < _EXPONENT else value


def _tag(_: object, kind: type[yaml.Node], value: str, implicit: tuple[bool, bool]) -> str:
    if kind is yaml.ScalarNode and implicit[0]:
        return _MERGE if value == "<<" else _TAGS[type(resolve(value))]
    return _NODE_TAGS[kind]


class _Dumper(yaml.SafeDumper):
    """Quote text that `resolve` would read as something else."""

    resolve = _tag

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Represent half a surrogate pair (from a path that is not UTF-8) in binary: libyaml rejects its escape."""
        try:
            text.encode()
        except UnicodeEncodeError:
            return self.represent_binary(text.encode("utf-8", "surrogatepass"))
        return self.represent_str(text)


_Dumper.add_representer(str, _Dumper.represent_text)


class _Loader(_Base):
    """Resolve scalars as go-yaml does, and make each key text."""

    resolve = _tag

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        self.flatten_mapping(node)
        return {self._key(key): self.construct_object(value, deep) for key, value in node.value}

    def _key(self, node: yaml.Node) -> str:
        key = self.construct_object(node, deep=True)
        if isinstance(key, str):
            return key
        if isinstance(key, bool):
            return "true" if key else "false"
        if isinstance(key, int | float):
            return str(key)
        raise MarkedYAMLError(problem="a key is not a string", problem_mark=node.start_mark)

    def construct_resolved(self, node: yaml.ScalarNode) -> bool | int | float | str | None:
        value = resolve(node.value)
        if _TAGS[type(value)] == node.tag or (node.tag == _TAGS[float] and isinstance(value, int)):
            return _as_json(value)
        raise MarkedYAMLError(problem=f"a value is not of type {node.tag}", problem_mark=node.start_mark)

    def construct_text(self, node: yaml.ScalarNode) -> str:
        return self.construct_yaml_binary(node).decode("utf-8", "surrogatepass")


for _type in (type(None), bool, int, float):
    _Loader.add_constructor(_TAGS[_type], _Loader.construct_resolved)
_Loader.add_constructor(_MERGE, lambda *_: "<<")
_Loader.add_constructor(f"{_TAG}binary", _Loader.construct_text)


def _construct(loader: _Loader, node: yaml.Node) -> object:
    try:
        return loader.construct_document(node)
    except YAMLError:
        raise
    except Exception as error:
        # PyYAML converts the values of explicit tags such as !!timestamp without checks.
        raise MarkedYAMLError(
            problem=f"a value does not match its tag: {error}", problem_mark=node.start_mark
        ) from None


def _duplicates(node: yaml.Node, path: tuple[str, ...], visited: set[int]) -> Iterator[tuple[str, ...]]:
    if not isinstance(node, yaml.MappingNode) or id(node) in visited:
        return
    visited.add(id(node))
    seen: set[str] = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                yield (*path, key.value)
            seen.add(key.value)
            yield from _duplicates(value, (*path, key.value), visited)


def _checked(text: str | bytes) -> Iterator[yaml.Event]:
    """Yield the events of a text.

    Raises MarkedYAMLError if it is of YAML 1.2, which Go does not read, is nested too deeply, has too many values, its
    aliases expand to too much, or one contains itself.
    """
    size = aliased = 0
    anchored: dict[str | None, int] = {}  # sizes
    open_collections: list[tuple[str | None, int]] = []  # anchor, and size before it
    for number, event in enumerate(yaml.parse(text, Loader=_Loader)):
        if number > _MAX_VALUES:
            raise _fault("it has too many values; use JSON", event)
        match event:
            case yaml.DocumentStartEvent(version=(_, minor)) if minor != 1:
                raise _fault("found incompatible YAML document", event)
            case yaml.AliasEvent():
                if event.anchor not in anchored:
                    raise _fault(f"anchor {event.anchor} is undefined or contains itself", event)
                added = anchored[event.anchor]
                size, aliased = size + added, aliased + added
                if aliased > _MAX_ALIASED:
                    raise _fault("its aliases expand to too much data", event)
            case yaml.ScalarEvent():
                size += 1 + len(event.value)
                if event.anchor:
                    anchored[event.anchor] = 1 + len(event.value)
            case yaml.CollectionStartEvent():
                open_collections.append((event.anchor, size))
                anchored.pop(event.anchor, None)
                size += 1
                if len(open_collections) > _MAX_DEPTH:
                    raise _fault("it is nested too deeply", event)
            case yaml.CollectionEndEvent():
                anchor, before = open_collections.pop()
                if anchor:
                    anchored[anchor] = size - before
        yield event


def _fault(problem: str, event: yaml.Event) -> MarkedYAMLError:
    return MarkedYAMLError(problem=problem, problem_mark=event.start_mark)  # type: ignore[arg-type]
