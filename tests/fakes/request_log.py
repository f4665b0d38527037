"""A log of an API server's requests."""

import threading
from collections import Counter, deque

import msgspec


class Entry(msgspec.Struct, frozen=True):
    """One request. The resource is the plural with its group, such as endpointslices.discovery.k8s.io, or ""."""

    verb: str
    resource: str
    path: str
    query: str
    user_agent: str
    namespace: str = ""
    name: str = ""


class RequestLog:
    """Counts all requests by verb and resource, and keeps the latest 10,000."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: deque[Entry] = deque(maxlen=10_000)
        self._counts: Counter[tuple[str, str]] = Counter()

    def record(self, entry: Entry) -> None:
        """Add a request."""
        with self._changed:
            self._entries.append(entry)
            self._counts[entry.verb, entry.resource] += 1
            self._changed.notify_all()

    def entries(self, verb: str = "", resource: str = "") -> list[Entry]:
        """Return the latest requests, oldest first, all or of one verb or resource."""
        with self._changed:
            return [e for e in self._entries if verb in ("", e.verb) and resource in ("", e.resource)]

    def count(self, verb: str = "", resource: str = "") -> int:
        """Return the number of requests, all or of one verb or resource."""
        with self._changed:
            return self._count(verb, resource)

    def counts(self) -> dict[str, int]:
        """Return the number of requests by keys such as "list services"."""
        with self._changed:
            return {f"{verb} {resource}".strip(): count for (verb, resource), count in self._counts.items()}

    def wait(self, count: int, verb: str = "", resource: str = "", seconds: float = 10.0) -> None:
        """Wait for a number of requests. Raise TimeoutError if they do not come in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._count(verb, resource) >= count, seconds):
                kind = f"{verb} {resource}".strip() or "any"
                raise TimeoutError(
                    f"{self._count(verb, resource)} requests ({kind}) after {seconds} s, not {count}"
                )

    def clear(self) -> None:
        """Reset log and counts."""
        with self._changed:
            self._entries.clear()
            self._counts.clear()

    def _count(self, verb: str, resource: str) -> int:
        return sum(n for (v, r), n in self._counts.items() if verb in ("", v) and resource in ("", r))
