"""Compressed responses, unpacked in small pieces: a few bytes may expand to gigabytes."""

import zlib
from collections.abc import Iterator

import urllib3

from pykubeproxy.sources.failures import Failure

_GZIP = zlib.MAX_WBITS | 16
_PIECE = 1 << 16
_ADVICE = "check proxies in between, or set disable-compression in the kubeconfig"


def content(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Yield the body of a response in pieces of at most 64 KiB, unpacked if the server compressed it. Raises Failure."""
    body = iter(lambda: response.read1(_PIECE, decode_content=False), b"")
    compressed = response.headers.get("Content-Encoding", "").lower() == "gzip"
    return unpacked(body) if compressed else body


def unpacked(body: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the contents of gzip data in pieces of at most 64 KiB. Raises Failure if it is corrupt or incomplete."""
    member, begun = zlib.decompressobj(_GZIP), False
    for data in body:
        while data:
            begun = True
            try:
                piece = member.decompress(data, _PIECE)
            except zlib.error as error:
                raise Failure(
                    f"the API server sent corrupt gzip data ({error}): {_ADVICE}", persistent=True
                ) from None
            if piece:
                yield piece
            data = member.unconsumed_tail
            if member.eof:
                # Further members may follow.
                data, member, begun = member.unused_data, zlib.decompressobj(_GZIP), False
    if begun:
        raise Failure(
            f"the API server's response ended in the middle of gzip data: {_ADVICE}", persistent=True
        )
