"""The image: its recipe carried out in Debian root file systems, and what comes out tried as in the DaemonSet."""

import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.image.__main__ import DEBIAN
from tests.image.root import settings

pytestmark = pytest.mark.root


@pytest.fixture(autouse=True)
def needed(tmp_path: Path) -> None:
    """Skip by name what cannot be had here."""
    if not shutil.which("debootstrap"):
        pytest.skip("debootstrap is not installed")
    try:
        urllib.request.urlopen(f"{DEBIAN}/dists/stable/InRelease", timeout=20).close()
    except (urllib.error.URLError, OSError) as error:
        pytest.skip(f"Debian's archive is out of reach: {error}")
    # In the root, pip sees nothing of the wheels that lie about on this machine.
    own = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    lying_about = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")
    environment = own | {name: value for name, value in settings().items() if name not in lying_about}
    pip = [sys.executable, "-m", "pip"]
    download = [*pip, "download", "--quiet", "--no-deps", "--dest", tmp_path, "hatchling"]
    if subprocess.run(download, env=environment, stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("the index of Python packages is out of reach")


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
