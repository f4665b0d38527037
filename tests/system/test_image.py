"""The image: its recipe carried out in Debian root file systems, and what comes out tried as in the DaemonSet."""

import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.image.__main__ import DEBIAN

pytestmark = pytest.mark.root


@pytest.fixture(autouse=True)
def needed() -> None:
    """Skip by name what cannot be had here."""
    if not shutil.which("debootstrap"):
        pytest.skip("debootstrap is not installed")
    try:
        urllib.request.urlopen(f"{DEBIAN}/dists/stable/InRelease", timeout=20).close()
    except (urllib.error.URLError, OSError) as error:
        pytest.skip(f"Debian's archive is out of reach: {error}")


def test_the_recipe_makes_an_image_that_works() -> None:
    """Small enough, nobody's but root's, and on a read-only root with two capabilities all conformance cases hold."""
    made = subprocess.run(
        [sys.executable, "-m", "tests.image"],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout[-5000:]
    assert "all is well" in made.stdout
