"""Measure the time from a change of endpoints until its rules are applied."""

from collections.abc import Collection, Iterable

from pykubeproxy.objects import Deleted, EndpointSlice, Event, Family, Key, Kind, Listed, Updated
from pykubeproxy.services.cluster import families_of


class Latencies:
    """Remember the trigger times of EndpointSlices until a sync applies them. Call from the loop thread only.

    All times are seconds since 1970. Ignore changes before `started`, which waited for this process, and slices that
    cause no sync: without a Service, headless, or of families that are not served.
    """

    def __init__(self, started: float, families: Iterable[Family]) -> None:
        self._started = started
        self._seen: dict[Key, float] = {}
        # The times of each slice, with the Service of the slice.
        self._pending: dict[Family, dict[Key, tuple[Key, list[float]]]] = {family: {} for family in families}

    def event_applied(self, event: Event) -> None:
        """Remember the trigger times of an event, before or after it is applied."""
        match event:
            case Updated(EndpointSlice() as slice_):
                self._note(slice_, event.trigger_times())
            case Listed(Kind.ENDPOINT_SLICE, objects):
                present = {object_.key for object_ in objects}
                for key in self._seen.keys() - present:
                    self._forget(key)
                for object_ in objects:
                    if isinstance(object_, EndpointSlice):
                        self._note(object_, Updated(object_).trigger_times())
            case Deleted(Kind.ENDPOINT_SLICE, key):
                self._forget(key)

    def sync_succeeded(self, family: Family, now: float, deferred: Collection[Key] = ()) -> list[float]:
        """Return the latency in seconds of each change in one family that a sync applied.

        The changes of `deferred` Services are not applied yet.
        """
        pending = self._pending[family]
        self._pending[family] = {key: it for key, it in pending.items() if it[0] in deferred}
        applied = (triggers for service, triggers in pending.values() if service not in deferred)
        return [max(0.0, now - trigger) for triggers in applied for trigger in triggers]

    def _note(self, slice_: EndpointSlice, triggers: tuple[float, ...]) -> None:
        seen = self._seen.get(slice_.key)
        new = [trigger for trigger in triggers if trigger > self._started and trigger != seen]
        for family in families_of(slice_).intersection(self._pending) if new else ():
            self._seen[slice_.key] = new[-1]
            _, earlier = self._pending[family].get(slice_.key, (None, []))
            self._pending[family][slice_.key] = (slice_.service_key, [*earlier, min(new)])

    def _forget(self, key: Key) -> None:
        # The trigger time of a deleted slice is that of its last change, not of the deletion.
        self._seen.pop(key, None)
        for pending in self._pending.values():
            pending.pop(key, None)
