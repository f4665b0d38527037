"""Messages never hold the password of a server's URL."""

import pytest

from pykubeproxy.sources import Client, SourceError
from pykubeproxy.sources.failures import Failure

URLS = ["http://me:s3cret@127.0.0.1:1", "https://me:s3c@s3cret@host/path", "http://s3cret@[::1]:1"]


@pytest.mark.parametrize("url", URLS)
def test_a_server_that_does_not_answer(url: str) -> None:
    """The message names it without user and password."""
    client = Client(master=url, qps=-1)
    assert "s3cret" not in client.server
    assert client.server.startswith(("http://127.0.0.1:1", "https://host/path", "http://[::1]:1"))
    stream = client.stream("/api/v1/services", {}, resource="services", idle=1.0)
    with pytest.raises(Failure) as caught, stream:
        pass
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://me:s3cret@host", "me:s3cret@host/path"])
def test_invalid_url(url: str) -> None:
    """The message names the host only."""
    with pytest.raises(SourceError, match="host") as caught:
        Client(master=url)
    assert "s3cret" not in str(caught.value)
