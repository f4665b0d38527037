"""Mutated seeds: pieces are missing, doubled, moved or replaced."""

from hypothesis import strategies as st

from tests.fuzz.targets import Target

_NUMBERS = (b"0", b"-1", b"65536", b"4294967296", b"1" * 30, b"\xff\xff\xff\xff", b"\x00\x00\x00\x00")


@st.composite
def inputs(draw: st.DrawFn, target: Target) -> bytes:
    """Draw a mutated seed or, one time in ten, random bytes."""
    mutated = draw(st.sampled_from(target.seeds))
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=300))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(mutated)))
        end = min(len(mutated), start + draw(st.integers(0, 40)))
        piece = draw(
            st.one_of(
                st.just(b""),
                st.sampled_from(target.tokens or _NUMBERS),
                st.sampled_from(_NUMBERS),
                st.just(mutated[start:end] * 2),
                st.just(mutated[end : end + 40]),
                st.sampled_from(target.seeds).map(lambda other, at=start: other[at : at + 60]),
                st.binary(max_size=6),
            )
        )
        mutated = mutated[:start] + piece + mutated[end:]
    return mutated
