"""What a source tells: the whole state of a kind, or one object that came, changed or went."""

import msgspec

from pykubeproxy.objects.values import Key, Kind, Object


class Listed(msgspec.Struct, frozen=True):
    """The complete present state of a kind: an object that is not in it is gone."""

    kind: Kind
    objects: tuple[Object, ...]


class Updated(msgspec.Struct, frozen=True):
    """One object as it is now, whether new or changed."""

    object: Object


class Deleted(msgspec.Struct, frozen=True):
    """One object that is gone, or that can no longer be decoded and counts as gone."""

    kind: Kind
    key: Key


Event = Listed | Updated | Deleted
