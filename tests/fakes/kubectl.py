"""The real kubectl, and its plugin, at the API server of a lab."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pykubeproxy.lab.cluster import Lab
from tests.fakes.waiting import PATIENCE

KUBECTL = shutil.which("kubectl")
NO_KUBECTL = "kubectl is not installed; on x86_64 and arm64, `make venv` installs it"
needs_kubectl = pytest.mark.skipif(not KUBECTL, reason=NO_KUBECTL)


def kubectl(lab: Lab, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run kubectl with `given` as its input; the caller has entered a namespace of the lab's clients."""
    environment = {
        **os.environ,
        # Outside pytest, it may lack the folder of the plugin.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(lab.directory.path),  # its cache
        "KUBECONFIG": str(lab.directory.kubeconfig),
    }
    return subprocess.run(
        ["kubectl", *arguments],
        input=given,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
