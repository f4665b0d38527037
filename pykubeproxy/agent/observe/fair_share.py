"""Choose which Services get a scarce resource of the node, so that no namespace takes all of it."""

import heapq
from collections import Counter
from collections.abc import Iterable, Set

from pykubeproxy.objects import Key

# A namespace gets more only while it has fewer than this many times the places that are left.
_SHARE = 8


def fair_share(candidates: Iterable[Key], holders: Set[Key], places: int) -> set[Key]:
    """Return the Services that get a place; holders keep theirs as long as there are enough places.

    The others get one in turn, first those of the namespace with fewest. One namespace alone gets 8 of 9 places, and
    those that come later find places too.
    """
    candidates = set(candidates)
    chosen = candidates & holders
    if len(chosen) > places:
        chosen = fair_share(chosen, set(), places)
    waiting: dict[str, list[Key]] = {}
    for key in sorted(candidates - chosen, reverse=True):
        waiting.setdefault(key.namespace, []).append(key)
    held = Counter(key.namespace for key in chosen)
    queue = [(held[namespace], namespace) for namespace in waiting]
    heapq.heapify(queue)
    while queue:
        number, namespace = queue[0]
        if number >= _SHARE * (places - len(chosen)):
            break
        chosen.add(waiting[namespace].pop())
        if waiting[namespace]:
            heapq.heapreplace(queue, (number + 1, namespace))
        else:
            heapq.heappop(queue)
    return chosen
