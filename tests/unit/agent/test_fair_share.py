"""Shares of a scarce resource among namespaces."""

from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy.agent.observe.fair_share import fair_share
from pykubeproxy.objects import Key


def services(namespace: str, number: int) -> set[Key]:
    return {Key(namespace, f"s{position:04}") for position in range(number)}


def test_all_get_a_place_if_there_are_enough() -> None:
    everything = services("a", 80) | services("b", 2)
    assert fair_share(everything, set(), 92) == everything


def test_holders_keep_their_places() -> None:
    """A tenant with many Services takes none of them away, nor can one push out its own."""
    held = services("victim", 60)
    now = fair_share(held | services("attacker", 1100), held, 100)
    assert held < now
    assert fair_share(services("attacker", 2000) | held, now, 100) >= now


def test_a_namespace_leaves_places_for_others() -> None:
    """One that comes later finds a place, and so do many of them."""
    held = fair_share(services("attacker", 1100), set(), 90)
    assert len(held) == 80
    late = {Key(f"late{number}", "web") for number in range(10)}
    assert fair_share(held | services("attacker", 1100) | late, held, 90) == held | late


def test_places_are_given_in_turn() -> None:
    """All at once, as after a restart, the namespace with fewest comes first."""
    chosen = fair_share(services("attacker", 1100) | services("b", 20) | services("c", 5), set(), 60)
    assert services("b", 20) | services("c", 5) <= chosen
    assert len(chosen) <= 60


def test_fewer_places_are_shared_anew() -> None:
    """When the node gets more addresses, each Service needs more places."""
    held = services("attacker", 70) | services("victim", 3)
    assert services("victim", 3) <= fair_share(held, held, 20)


keys = st.builds(Key, st.sampled_from("abcd"), st.integers(0, 40).map(str))


@given(st.sets(keys), st.sets(keys), st.integers(0, 60))
def test_places_are_never_exceeded_and_choices_are_stable(
    candidates: set[Key], holders: set[Key], places: int
) -> None:
    chosen = fair_share(candidates, holders, places)
    assert chosen <= candidates
    assert len(chosen) <= places
    assert fair_share(candidates, chosen, places) == chosen
    if places:
        assert bool(chosen) is bool(candidates)
