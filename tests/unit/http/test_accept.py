"""Content negotiation."""

import pytest

from pykubeproxy.http.accept import accepts_gzip, preferred

OFFERED = {
    "text": "text/plain; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "json": "application/json",
}


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", "text"),
        ("*/*", "text"),
        ("text/*", "text"),
        ("image/png", "text"),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "html"),
        ("application/json", "json"),
        ("text/html;q=0.4, application/json;q=0.5", "json"),
        ("application/json;q=0, text/html", "html"),
        ("application/json; q=nonsense, text/html;q=0.1", "html"),
        ("application/json; charset=utf-8", "json"),
        ("application/json;as=Statusz;v=v1beta1;g=config.k8s.io", "text"),
    ],
)
def test_content_negotiation(accept: str, expected: str) -> None:
    """As browsers, curl and programs send it."""
    assert preferred(accept, tuple(OFFERED.values())) == OFFERED[expected]


@pytest.mark.parametrize(
    ("accept_encoding", "expected"),
    [
        ("gzip", True),
        ("gzip, deflate, br", True),
        ("deflate, GZIP;q=0.5", True),
        ("", False),
        ("gzip;q=0", False),
        ("identity", False),
        ("*", False),
        ("zstd", False),
        ("identity;q=0.5, gzip;q=0.5", False),
    ],
)
def test_gzip_is_used_when_kube_proxy_uses_it(accept_encoding: str, expected: bool) -> None:
    """The results are those of a kube-proxy."""
    assert accepts_gzip(accept_encoding) is expected
