"""What a list or watch asks for: parameters of the URL, label and field selectors."""

import re
from collections.abc import Callable, Mapping
from urllib.parse import parse_qsl

from pykubeproxy.lab.apiserver.errors import ApiError
from pykubeproxy.lab.apiserver.history import Stored
from pykubeproxy.lab.apiserver.resources import Resource

_Test = Callable[[Mapping[str, str]], bool]

_KEY = r"[A-Za-z0-9](?:[-A-Za-z0-9_./]*[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?)?"
_EXISTS = re.compile(rf"(!?)\s*({_KEY})")
_EQUALS = re.compile(rf"({_KEY})\s*(==|=|!=)\s*({_VALUE})")
_IN = re.compile(rf"({_KEY})\s+(in|notin)\s*\(([^()]*)\)")
_SEPARATOR = re.compile(r",(?![^()]*\))")  # a comma outside parentheses


class Query:
    """The query of a URL. A parameter that is absent equals an empty one."""

    def __init__(self, text: str) -> None:
        self._pairs = parse_qsl(text, keep_blank_values=True)
        self._values = dict(self._pairs)

    def text(self, name: str) -> str:
        """Return a parameter, "" if absent."""
        return self._values.get(name, "")

    def texts(self, name: str) -> list[str]:
        """Return all values of a parameter in their order."""
        return [value for other, value in self._pairs if other == name]

    def flag(self, name: str) -> bool:
        """Return whether a parameter is true or 1."""
        return self.text(name).lower() in ("true", "1")

    def number(self, name: str) -> int:
        """Return a whole number, 0 if absent. Raise a 400 for anything else."""
        text = self.text(name)
        if text and not (text.isascii() and text.isdigit()):
            raise ApiError(400, f'{name}: Invalid value: "{text}": must be a whole number')
        return int(text or 0)


class Selector:
    """A namespace ("" for all), labels and fields to select by.

    Raise a 400 if a selector cannot be parsed or names a field that is not selectable.
    """

    def __init__(self, resource: Resource, namespace: str = "", labels: str = "", fields: str = "") -> None:
        self._namespace = namespace
        self._labels = [_label_test(term) for term in _terms(labels)]
        selectable = {"metadata.name", "metadata.namespace", *resource.fields}
        self._fields = [_field_test(term, selectable) for term in _terms(fields)]

    @property
    def selective(self) -> bool:
        """Whether it selects by more than a namespace."""
        return bool(self._labels or self._fields)

    def matches(self, stored: Stored) -> bool:
        if self._namespace and stored.namespace != self._namespace:
            return False
        return all(test(stored.labels) for test in self._labels) and all(
            test(stored.fields) for test in self._fields
        )


def _terms(text: str) -> list[str]:
    return [term.strip() for term in _SEPARATOR.split(text)] if text.strip() else []


def _label_test(term: str) -> _Test:
    if match := _EXISTS.fullmatch(term):
        negated, key = match.groups()
        return lambda labels: (key in labels) != bool(negated)
    if match := _EQUALS.fullmatch(term):
        key, operator, value = match.groups()
        return _value_test(key, {value}, operator == "!=")
    if match := _IN.fullmatch(term):
        key, operator, listed = match.groups()
        values = {value.strip() for value in listed.split(",")}
        if all(re.fullmatch(_VALUE, value) for value in values):
            return _value_test(key, values, operator == "notin")
    raise _unparsable("label", term)


def _field_test(term: str, selectable: set[str]) -> _Test:
    match = re.fullmatch(r"([^=!]+)(==|=|!=)(.*)", term)
    if match is None:
        raise _unparsable("field", term)
    key, operator, value = match.groups()
    if key not in selectable:
        raise ApiError(400, f"field label not supported: {key}; use one of {', '.join(sorted(selectable))}")
    return _value_test(key, {value}, operator == "!=")


def _value_test(key: str, values: set[str], negated: bool) -> _Test:
    """An object without the key fails `=` and `in` and passes `!=` and `notin`."""
    return lambda pairs: (pairs.get(key) in values) != negated


def _unparsable(kind: str, term: str) -> ApiError:
    return ApiError(400, f"unable to parse requirement: {term!r} is not a {kind} selector")
