"""The container image, built with podman and run as in the DaemonSet."""

from pathlib import Path

import pytest

from tests.image.__main__ import build_and_test
from tests.image.base import Unavailable

pytestmark = pytest.mark.root


def test_dockerfile_builds_a_working_image(tmp_path: Path) -> None:
    """The image is small, has no build tools, runs with two capabilities and passes the conformance cases."""
    try:
        build_and_test(tmp_path)
    except Unavailable as reason:
        pytest.skip(str(reason))
