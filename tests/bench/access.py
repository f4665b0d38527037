"""Let programs reach the API server as in a pod, with the files of a service account, or with a kubeconfig."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.bench.server import CERTIFICATE, KEY
from tests.fakes.certificates import write_certificate

# Mount a tmpfs on /run, with the service account and the directory of the benchmark; the machine's own /run stays as it is.
_MOUNTS = """
mount -n -t tmpfs tmpfs /mnt
mkdir -p /mnt/secrets/kubernetes.io/serviceaccount "/mnt/${1#/run/}"
cp "$1"/ca.crt "$1"/token /mnt/secrets/kubernetes.io/serviceaccount/
mount -n --bind "$1" "/mnt/${1#/run/}"
mount -n --move /mnt /run
echo ready
exec cat
"""


def write_credentials(folder: Path, address: str) -> None:
    """Write the API server's certificate for an address, its key, and the token of the service account."""
    write_certificate(folder / CERTIFICATE, folder / KEY, address)
    (folder / "token").write_text("of-the-pod")


class Pod:
    """A mount namespace with the files of a service account. A process holds it until `close`."""

    def __init__(self, directory: Path) -> None:
        entering = ("unshare", "--mount", "--propagation", "private", "sh", "-ec", _MOUNTS, "pod")
        self._holder = subprocess.Popen(
            [*entering, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            raise RuntimeError("the mount namespace of the pod was not created")

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs this one in the pod."""
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", *command]

    def close(self) -> None:
        """End the process that holds the namespace."""
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.wait()
        self._holder.stdout.close()
