"""What the agent knows is what the kernel holds, whatever happens while it writes."""

import random
import threading
from collections.abc import Iterator

import msgspec
import pytest

from pykubeproxy.kernel import Backend, Iptables
from pykubeproxy.kernel.runner import kill_commands
from pykubeproxy.objects import Deleted, Event, Family, Key, Kind, Updated
from tests.fakes.synced import SyncedFamily, flags_context
from tests.objects import service, slice_of

SERVICES, ROUNDS = 12, 12


def random_events(rng: random.Random, family: Family) -> Iterator[Event]:
    """Yield events that create, change or delete some Services."""
    v6 = family is Family.IPV6
    for number in rng.sample(range(SERVICES), rng.randrange(1, SERVICES)):
        name = f"svc{number}"
        if rng.random() < 0.2:
            yield Deleted(Kind.SERVICE, Key("ns", name))
            continue
        endpoints = sorted(rng.sample(range(1, 250), rng.randrange(9)))
        pods = (f"fd00:10:{number + 1:x}::{at:x}" if v6 else f"10.244.{number}.{at}" for at in endpoints)
        yield Updated(service(name, cluster_ip=f"fd00:96::{number + 1:x}" if v6 else f"10.96.0.{number + 1}"))
        yield Updated(msgspec.structs.replace(slice_of(*pods, service=name), family=family))


@pytest.mark.parametrize("dispatch", ["flat", "tree"])
def test_known_tables_are_true_after_commands_were_killed(
    iptables: Iptables, backend: Backend, family: Family, dispatch: str
) -> None:
    """Between blocks and inside; the next sync writes the rules of a fresh start."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    node = SyncedFamily(
        context=flags_context(family, False, dispatch=dispatch),
        chains_per_block=3 if backend is Backend.NFT else None,
        live=iptables,
    )
    killed, longest = 0, 0.06 if backend is Backend.NFT else 0.015
    for _ in range(ROUNDS):
        killer = threading.Timer(rng.uniform(0.0, longest), kill_commands)
        killer.start()
        node.round(*random_events(rng, family))
        killer.cancel()
        killer.join()
        killed += bool(node.tables._known.doubtful or node.tables._known.unread)
        node.check_known()
    node.round()
    node.check_known()
    fresh = node.fresh()
    fresh.sync()
    assert node.our_chains() == fresh.our_chains()
    print(f"{killed} of {ROUNDS} syncs were killed")
