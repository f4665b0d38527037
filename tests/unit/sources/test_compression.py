"""Unpacking of compressed responses."""

import gzip
import random
from collections.abc import Iterator

import pytest

from pykubeproxy.sources.compression import unpacked
from pykubeproxy.sources.failures import Failure

TEXT = random.Random(1).randbytes(1000) * 200
WHOLE = gzip.compress(TEXT, mtime=0)


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    """Yield data as it might arrive."""
    return (data[at : at + size] for at in range(0, len(data), size))


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20])
def test_content_does_not_depend_on_how_bytes_arrive(size: int) -> None:
    assert b"".join(unpacked(pieces(WHOLE, size))) == TEXT


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_several_gzip_members_are_one_text(size: int) -> None:
    """A server may compress part by part."""
    parts = gzip.compress(b"one, ") + gzip.compress(b"") + gzip.compress(b"two")
    assert b"".join(unpacked(pieces(parts, size))) == b"one, two"


def test_an_empty_body_has_no_content() -> None:
    assert not list(unpacked(iter([])))


def test_a_bomb_is_unpacked_only_as_far_as_it_is_read() -> None:
    """Each piece is small, however much of the content a few bytes hold."""
    bomb = gzip.compress(bytes(1 << 26))
    assert len(bomb) < 70_000
    content = unpacked(iter([bomb]))
    for _ in range(10):
        assert len(next(content)) <= 1 << 16


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{}", "corrupt gzip data"),
        (b"\x1f\x8b\x08garbage-garbage-garbage", "corrupt gzip data"),
        (WHOLE[:500] + bytes([WHOLE[500] ^ 1]) + WHOLE[501:], "corrupt gzip data"),
        (WHOLE + b"more", "corrupt gzip data"),
        (WHOLE[:-1], "ended in the middle of gzip data"),
        (WHOLE[: len(WHOLE) // 2], "ended in the middle of gzip data"),
        (WHOLE[:5], "ended in the middle of gzip data"),
    ],
    ids=["no gzip", "no deflate", "a flipped bit", "more data", "no last byte", "half", "half a header"],
)
def test_corrupt_or_incomplete_data_is_a_failure(data: bytes, reason: str) -> None:
    """The reason is one line, with advice."""
    with pytest.raises(Failure, match=reason) as caught:
        list(unpacked(pieces(data, 100)))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("or set disable-compression in the kubeconfig")
    assert caught.value.persistent
