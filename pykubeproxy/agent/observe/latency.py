"""How long after their cause changes of endpoints came into force."""

from collections.abc import Iterable

from pykubeproxy.objects import Deleted, EndpointSlice, Event, Family, Key, Kind, Listed, Updated


class Latencies:
    """Remembers the trigger times of EndpointSlices until the rules that follow from them are in force.

    What was triggered before `started` (seconds since 1970, as all times here) does not count: it was waiting for this
    process, not the other way round. Nor do slices of other families than these, whose rules never come into force. For
    one thread.
    """

    def __init__(self, started: float, families: Iterable[Family]) -> None:
        self._started = started
        self._seen: dict[Key, float] = {}
        self._pending: dict[Family, dict[Key, list[float]]] = {family: {} for family in families}

    def noted(self, event: Event) -> None:
        """Take in an event, before or after it is applied; one that brings no new trigger time changes nothing."""
        match event:
            case Updated(EndpointSlice() as slice_):
                self._note(slice_)
            case Listed(Kind.ENDPOINT_SLICE, objects):
                present = {object_.key for object_ in objects}
                for key in self._seen.keys() - present:
                    self._forget(key)
                for object_ in objects:
                    if isinstance(object_, EndpointSlice):
                        self._note(object_)
            case Deleted(Kind.ENDPOINT_SLICE, key):
                self._forget(key)

    def programmed(self, family: Family, now: float) -> list[float]:
        """All that was noted in this family is in force now: how many seconds after its cause, for each change."""
        pending, self._pending[family] = self._pending[family], {}
        return [max(0.0, now - trigger) for triggers in pending.values() for trigger in triggers]

    def _note(self, slice_: EndpointSlice) -> None:
        trigger, pending = slice_.trigger_time, self._pending.get(slice_.family) if slice_.family else None
        if trigger is None or pending is None or slice_.headless or trigger <= self._started:
            return
        if self._seen.get(slice_.key) != trigger:
            self._seen[slice_.key] = trigger
            pending.setdefault(slice_.key, []).append(trigger)

    def _forget(self, key: Key) -> None:
        """A slice that went bears the time of its last change, which says nothing of its going."""
        self._seen.pop(key, None)
        for pending in self._pending.values():
            pending.pop(key, None)
