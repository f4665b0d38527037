"""What the headers Accept and Accept-Encoding name."""

import pytest

from pykubeproxy.http import accepts


@pytest.mark.parametrize(
    ("accept", "html", "json"),
    [
        ("", False, False),
        ("*/*", False, False),
        ("text/*", False, False),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", True, False),
        ("application/json", False, True),
        ("Application/JSON; charset=utf-8", False, True),
        ("application/json;q=0, text/html;q=0.4", True, False),
        ("application/json;as=Statusz;v=v1beta1;g=config.k8s.io", False, False),
    ],
)
def test_media_types_are_named(accept: str, html: bool, json: bool) -> None:
    """As browsers, curl and programs send it."""
    assert (accepts(accept, "text/html"), accepts(accept, "application/json")) == (html, json)


@pytest.mark.parametrize(
    ("accept_encoding", "expected"),
    [
        ("gzip", True),
        ("gzip, deflate, br", True),
        ("deflate, GZIP;q=0.5", True),
        ("", False),
        ("gzip;q=0", False),
        ("gzip;q=0.000", False),
        ("identity", False),
        ("*", False),
        ("zstd", False),
    ],
)
def test_gzip_is_used_when_kube_proxy_uses_it(accept_encoding: str, expected: bool) -> None:
    """The results are those of a kube-proxy."""
    assert accepts(accept_encoding, "gzip") is expected
