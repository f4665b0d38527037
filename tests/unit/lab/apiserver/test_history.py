"""The past of the store, checked against a plain record of it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.lab.apiserver import NODES, ApiError, Store
from pykubeproxy.lab.apiserver.store import Lagging
from tests.unit.lab.apiserver.conftest import Json

STEPS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(["write", "delete", "compact"])), max_size=40
)


def node(name: str, label: str) -> Json:
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"n": label}}}


def contents(snapshot: Any) -> Any:
    return {stored.name: stored.labels["n"] for stored in snapshot.objects}


@settings(deadline=None, max_examples=60)
@given(STEPS)
def test_every_version_can_be_had_until_it_is_compacted(steps: Any) -> None:
    """A snapshot at a version is the state then; before the last compaction it is a 410."""
    store, present, oldest = Store(), {}, 1
    past: dict[int, dict[str, str]] = {store.version: {}}
    for number, (name, what) in enumerate(steps):
        if what == "compact":
            store.compact()
            oldest = store.version
        elif what == "write":
            (store.replace if name in present else store.create)(node(name, str(number)))
            present[name] = str(number)
        elif name in present:
            store.delete(NODES, "", name)
            del present[name]
        past[store.version] = dict(present)
    for version, expected in past.items():
        if version >= oldest:
            snapshot = store.snapshot(NODES, version)
            assert contents(snapshot) == expected
            assert [stored.path for stored in snapshot.objects] == sorted(expected)
        else:
            with pytest.raises(ApiError) as gone:
                store.snapshot(NODES, version)
            assert gone.value.code == 410


@settings(deadline=None, max_examples=60)
@given(STEPS, st.integers(0, 40))
def test_replaying_changes_gives_the_present(steps: Any, begin: Any) -> None:
    """From any version on, the changes turn the state then into the state now."""
    store = Store(history=1000)
    present: dict[str, str] = {}
    states: list[tuple[int, dict[str, str]]] = [(1, {})]
    for number, (name, what) in enumerate(steps):
        if what == "write":
            (store.replace if name in present else store.create)(node(name, str(number)))
            present[name] = str(number)
        elif name in present:
            store.delete(NODES, "", name)
            del present[name]
        states.append((store.version, dict(present)))
    version, state = states[min(begin, len(states) - 1)]
    cursor = store.watch(NODES, version)
    reached, changes = store.changes(NODES, cursor)
    for change in changes:
        if change.new is None:
            assert change.old
            del state[change.old.name]
        else:
            state[change.new.name] = change.new.labels["n"]
    store.unwatch(NODES, cursor)
    assert (reached, state) == (store.version, present)


def test_a_cursor_left_behind_is_told() -> None:
    """When the log is trimmed past it, reading raises rather than skipping changes silently."""
    store = Store(history=4)
    cursor = store.watch(NODES, store.version)
    for number in range(10):
        store.create(node(f"n{number}", "x"))
    with pytest.raises(Lagging):
        store.changes(NODES, cursor)
    store.unwatch(NODES, cursor)
