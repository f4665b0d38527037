"""The real kubectl, and its plugin, at the API server of a lab."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pykubeproxy.lab.cluster import Lab

needs_kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")


def kubectl(lab: Lab, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run kubectl with `given` as its input; the caller has entered a namespace of the lab's clients."""
    environment = {
        **os.environ,
        "HOME": str(lab.directory.path),  # its cache
        "KUBECONFIG": str(lab.directory.kubeconfig),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    return subprocess.run(
        ["kubectl", *arguments],
        input=given,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
