"""Events from sources: all objects of a kind, or one object added, updated or deleted."""

import msgspec

from pykubeproxy.objects.values import Key, Kind, Object


class Listed(msgspec.Struct, frozen=True):
    """All objects of a kind: any other object of the kind has been deleted."""

    kind: Kind
    objects: tuple[Object, ...]


class Updated(msgspec.Struct, frozen=True):
    """One object, added or updated."""

    object: Object


class Deleted(msgspec.Struct, frozen=True):
    """One object that was deleted or can no longer be decoded."""

    kind: Kind
    key: Key


Event = Listed | Updated | Deleted
