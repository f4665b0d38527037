"""Another tenant's addresses make the dispatch tree as deep as they can; the victim's changes arrive in time."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pykubeproxy.lab.apiserver import SERVICES
from tests.fakes.cluster import service, slice_of
from tests.fakes.follower import eventually
from tests.fakes.victim import Victim, victim
from tests.hostile import nested_addresses

pytestmark = pytest.mark.root

SERVED = 4
# Each set has more than 225 addresses, which a tree by digits of four bits would place on up to 31 levels.
NESTED = [
    nested_addresses(near, copies=copies)
    for near, copies in (("fd00:96::9:9", 8), ("2001:db8::", 16), ("10.96.9.9", 60), ("fd00:96::9:9", 16))
]


def hostile(number: int) -> dict[str, Any]:
    addresses = NESTED[number % len(NESTED)]
    assert len(addresses) > 225
    return service(
        f"hostile{number % SERVED}",
        clusterIP=f"10.96.7.{number % SERVED + 1}",
        clusterIPs=[f"10.96.7.{number % SERVED + 1}", f"fd00:96::7:{number % SERVED + 1}"],
        ipFamilies=["IPv4", "IPv6"],
        ipFamilyPolicy="RequireDualStack",
        externalIPs=addresses,
    )


def create_hostile(made: Victim) -> Callable[[], None]:
    """Create the other tenant's Services; return what changes one of them."""
    objects = []
    for number in range(SERVED):
        objects.append(made.api.store.create(hostile(number)))
        endpoints = slice_of(f"hostile{number}", f"10.244.7.{number + 1}")
        made.api.store.create(endpoints)
        name = {"name": f"hostile{number}-6"}
        endpoint = {"addresses": [f"fd00:244:7::{number + 1}"], "conditions": {"ready": True}}
        six = {"metadata": endpoints["metadata"] | name, "addressType": "IPv6", "endpoints": [endpoint]}
        made.api.store.create(endpoints | six)
    count = itertools.count()

    def change() -> None:
        """Remove or add some addresses, so that the tree gets other levels and back."""
        turn = next(count)
        number = turn % SERVED
        addresses = NESTED[number % len(NESTED)]
        kept = addresses[:: 2 + turn % 3] if turn // SERVED % 2 else addresses
        spec = objects[number]["spec"] | {"externalIPs": list(kept)}
        objects[number] = made.api.store.replace(objects[number] | {"spec": spec})

    return change


@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_nested_external_ips_delay_no_other_service(backend: str, tmp_path: Path) -> None:
    """In both families. Services are neither quarantined nor served without a tree."""
    with victim(backend, tmp_path, dual_stack=True) as made:
        allowed = made.allowed()
        change = create_hostile(made)
        assert made.median_while(change) <= allowed
        log = made.log.read_text()
        assert not [words for words in ("rejected", "sync failed", "quarantined") if words in log]


@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_a_fresh_start_with_nested_external_ips_works(backend: str, tmp_path: Path) -> None:
    """The agent starts after the objects exist, on empty tables."""
    with victim(backend, tmp_path, dual_stack=True, before=create_hostile) as made:
        assert made.change() < 5
        made.api.store.delete(SERVICES, "default", "hostile0")
        eventually(made.is_served)
        log = made.log.read_text()
        assert "rules in place" in log
        assert not [words for words in ("rejected", "sync failed", "quarantined") if words in log]
