"""Read the headers Accept and Accept-Encoding of a request (RFC 9110, 12.5)."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_WEIGHT = re.compile(r"[01](\.\d{0,3})?")
# A parameter of a media type that does not select another content.
_CHARSET = "charset"


class AcceptEntry(NamedTuple):
    """An entry of Accept or Accept-Encoding: a media range or a coding in lower case, its parameters, its weight."""

    value: str
    parameters: Mapping[str, str]
    weight: float

    def covers(self, media_type: str) -> bool:
        """Return whether a media range includes this type."""
        return self.value in (media_type, f"{media_type.partition('/')[0]}/*", "*/*")


def ranges(header: str) -> list[AcceptEntry]:
    """Return the entries of a header. An invalid weight is 0."""
    return [_range(entry) for entry in header.split(",") if entry.strip()]


def preferred(accept: str, offered: Sequence[str]) -> str:
    """Return the offered content type that the header Accept prefers; of equals, and without a header, the first.

    A range with further parameters, such as "as=Table", asks for another content and does not count.
    """
    weights = {entry.value: entry.weight for entry in ranges(accept) if entry.parameters.keys() <= {_CHARSET}}

    def rank(content_type: str) -> float:
        media_type = content_type.partition(";")[0]
        of_type = (media_type, f"{media_type.partition('/')[0]}/*", "*/*")
        return next((weights[accepted] for accepted in of_type if accepted in weights), 0.0)

    return max(offered, key=rank)


def accepts_gzip(accept_encoding: str) -> bool:
    """Return whether the header Accept-Encoding prefers gzip to no compression."""
    weights = {entry.value: entry.weight for entry in ranges(accept_encoding)}
    plain = weights.get("identity", weights.get("*", 0.0))
    return weights.get("gzip", weights.get("*", 0.0)) > plain


def _range(entry: str) -> AcceptEntry:
    value, *pairs = (part.strip() for part in entry.split(";"))
    parameters = {
        name.strip().lower(): text.strip() for name, _, text in (pair.partition("=") for pair in pairs)
    }
    weight = parameters.pop("q", "1")
    return AcceptEntry(value.lower(), parameters, float(weight) if _WEIGHT.fullmatch(weight) else 0.0)
