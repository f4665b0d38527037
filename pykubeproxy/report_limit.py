"""Limit reports about objects, so that a user who changes objects all the time does not hide other reports."""

import math
from collections import Counter
from collections.abc import Hashable

from pykubeproxy.objects import Key


class ReportLimit:
    """Admit the first reports of each object and each namespace in every period of `seconds`.

    `per_object` limits the reports of one kind about an object, `per_namespace` those of all kinds about its objects, and
    `in_all` those of one kind; half of these are left to namespaces without one so far. Nodes have no namespace. It reads
    no clock: the caller passes the time in. Not thread-safe.
    """

    def __init__(self, seconds: float, per_object: int, per_namespace: int, in_all: float = math.inf) -> None:
        self._seconds = seconds
        self._per_object, self._per_namespace, self._in_all = per_object, per_namespace, in_all
        self._admitted: Counter[Hashable] = Counter()
        self.ends = -math.inf  # when the period ends

    def admits(self, kind: str, about: Key, now: float) -> bool:
        """Return whether to make a report of this kind now, and count it if so."""
        if now >= self.ends:
            self._admitted.clear()
            self.ends = now + self._seconds
        first = not self._admitted[kind, about.namespace]
        places: dict[Hashable, float] = {
            (kind, about): self._per_object,
            (kind, about.namespace): math.inf,
            kind: self._in_all if first else self._in_all / 2,
        }
        if about.namespace:
            places[None, about.namespace] = self._per_namespace
        if any(self._admitted[place] >= most for place, most in places.items()):
            return False
        self._admitted.update(places.keys())
        return True
