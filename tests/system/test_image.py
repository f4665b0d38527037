"""The container image, built with podman and run as in the DaemonSet."""

import pytest

from tests.image.__main__ import build_and_test
from tests.image.base import Unavailable

pytestmark = pytest.mark.root


def test_dockerfile_builds_a_working_image() -> None:
    """The image is small, has no build tools, runs with two capabilities and passes the conformance cases."""
    try:
        build_and_test()
    except Unavailable as reason:
        pytest.skip(str(reason))
