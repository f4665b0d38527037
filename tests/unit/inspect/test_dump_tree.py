"""Whether services are found by a tree or one after the other, dump-rules shows the same."""

import msgspec
import pytest
from hypothesis import given

from pykubeproxy.inspect.dump.model import ServiceView, views
from tests.unit.rules.test_packets import World, worlds

pytestmark = pytest.mark.usefixtures("small_trees")


def seen(world: World) -> list[ServiceView]:
    """What is shown, without the places at which rules stand."""

    def plain(view: ServiceView) -> ServiceView:
        endpoints = tuple(sorted(view.endpoints, key=lambda it: (it.address, it.port)))
        rounded = tuple(msgspec.structs.replace(it, share=round(it.share, 6)) for it in endpoints)
        frontends = tuple(sorted(view.frontends, key=str))
        return msgspec.structs.replace(view, frontends=frontends, endpoints=rounded)

    return sorted(
        (plain(view) for view in views(world.rules(), {})), key=lambda it: (it.name, it.policy.value)
    )


@given(worlds)
def test_a_tree_is_looked_through(world: World) -> None:
    """The same services, frontends, endpoints and shares."""
    assert seen(world._replace(dispatch="tree")) == seen(world._replace(dispatch="flat"))
