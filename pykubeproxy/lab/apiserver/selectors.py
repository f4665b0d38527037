"""Label and field selectors: parsed once, then asked of every object."""

import re
from collections.abc import Callable, Iterable, Mapping

from pykubeproxy.lab.apiserver.errors import ApiError, bad_request
from pykubeproxy.lab.apiserver.history import Stored
from pykubeproxy.lab.apiserver.resources import Resource

Test = Callable[[Mapping[str, str]], bool]

_KEY = r"[A-Za-z0-9](?:[-A-Za-z0-9_./]*[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?)?"
_EXISTS = re.compile(rf"(!?)\s*({_KEY})")
_EQUALS = re.compile(rf"({_KEY})\s*(==|=|!=)\s*({_VALUE})")
_AMONG = re.compile(rf"({_KEY})\s+(in|notin)\s*\(([^()]*)\)")
_SEPARATOR = re.compile(r",(?![^()]*\))")  # a comma that is not inside parentheses


class Selector:
    """What a list or watch is about: a namespace ("" for all), labels and fields.

    Raises a 400 if a selector cannot be parsed or names a field that cannot be selected on.
    """

    def __init__(self, resource: Resource, namespace: str = "", labels: str = "", fields: str = "") -> None:
        self._namespace = namespace
        self._labels = [_label_test(term) for term in _terms(labels)]
        known = {"metadata.name", "metadata.namespace", *resource.fields}
        self._fields = [_field_test(term, known) for term in _terms(fields)]

    @property
    def selective(self) -> bool:
        """Whether it asks for more than a namespace."""
        return bool(self._labels or self._fields)

    def matches(self, stored: Stored) -> bool:
        """Whether an object, in this version of it, is meant."""
        if self._namespace and stored.namespace != self._namespace:
            return False
        return all(test(stored.labels) for test in self._labels) and all(
            test(stored.fields) for test in self._fields
        )


def _terms(text: str) -> Iterable[str]:
    return [term.strip() for term in _SEPARATOR.split(text)] if text.strip() else []


def _label_test(term: str) -> Test:
    if match := _EXISTS.fullmatch(term):
        negated, key = match.groups()
        return (lambda labels: key not in labels) if negated else (lambda labels: key in labels)
    if match := _EQUALS.fullmatch(term):
        key, operator, value = match.groups()
        return _among(key, frozenset({value}), operator == "!=")
    if match := _AMONG.fullmatch(term):
        key, operator, values = match.groups()
        wanted = frozenset(value.strip() for value in values.split(","))
        if all(re.fullmatch(_VALUE, value) for value in wanted):
            return _among(key, wanted, operator == "notin")
    raise _unparsable("label", term)


def _field_test(term: str, known: set[str]) -> Test:
    match = re.fullmatch(r"([^=!]+)(==|=|!=)(.*)", term)
    if match is None:
        raise _unparsable("field", term)
    key, operator, value = match.groups()
    if key not in known:
        raise bad_request(f"field label not supported: {key}; one can select on {', '.join(sorted(known))}")
    return _among(key, frozenset({value}), operator == "!=")


def _among(key: str, values: frozenset[str], negated: bool) -> Test:
    """An object without the key is among no values: it fails `=` and `in` and passes `!=` and `notin`."""
    if negated:
        return lambda of: of.get(key) not in values
    return lambda of: of.get(key) in values


def _unparsable(what: str, term: str) -> ApiError:
    return bad_request(f"unable to parse requirement: {term!r} is not a {what} selector")
