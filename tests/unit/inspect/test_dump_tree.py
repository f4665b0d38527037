"""dump-rules shows the same for tree and flat dispatch."""

import msgspec
import pytest
from hypothesis import given

from pykubeproxy.inspect.dump.model import ServiceView, views
from tests.unit.rules.test_packets import World, worlds

pytestmark = pytest.mark.usefixtures("small_trees")


def normalized_views(world: World) -> list[ServiceView]:
    """Return the views without the positions of rules."""

    def plain(view: ServiceView) -> ServiceView:
        endpoints = tuple(sorted(view.endpoints, key=lambda it: (it.address, it.port)))
        rounded = tuple(msgspec.structs.replace(it, share=round(it.share, 6)) for it in endpoints)
        frontends = tuple(sorted(view.frontends, key=str))
        return msgspec.structs.replace(view, frontends=frontends, endpoints=rounded)

    return sorted(
        (plain(view) for view in views(world.rules(), {})), key=lambda it: (it.name, it.policy.value)
    )


@given(worlds)
def test_tree_dispatch_has_the_same_views(world: World) -> None:
    """Services, frontends, endpoints and shares are equal."""
    assert normalized_views(world._replace(dispatch="tree")) == normalized_views(
        world._replace(dispatch="flat")
    )
