"""The version of an API server."""

import msgspec

from pykubeproxy.sources.client import Client
from pykubeproxy.sources.failures import Failure

_SECONDS = 10.0


class _Version(msgspec.Struct):
    gitVersion: str  # noqa: N815


def server_version(client: Client) -> str:
    """Return a version such as v1.36.1. Raises Failure."""
    with client.stream("/version", {}, resource="its version", verbs="get of", idle=_SECONDS) as body:
        text = b"".join(body)
    try:
        return msgspec.json.decode(text, type=_Version).gitVersion
    except (ValueError, RecursionError) as error:
        raise Failure(f"the API server sent an invalid version: {error}") from None
