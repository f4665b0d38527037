"""Run podman as root with storage of its own, in a folder."""

import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType

_REMOVAL_SECONDS = 10.0


class Podman:
    """Runs podman commands on images and containers in `folder`; leaving the context removes them.

    podman allows 50 characters for the path of its runtime files, so `folder` must be short.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # runc and cgroupfs work on hosts with cgroup v1, v2 or both, with or without systemd.
        self._command = ["podman", f"--root={folder}/storage", f"--runroot={folder}/run"]
        self._command += ["--cgroup-manager=cgroupfs", "--runtime=runc"]

    def __enter__(self) -> "Podman":
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        deadline = time.monotonic() + _REMOVAL_SECONDS
        while self._folder.exists():
            for line in reversed(Path("/proc/mounts").read_text().splitlines()):
                if (mount := line.split()[1]).startswith(f"{self._folder}/"):
                    subprocess.run(["umount", mount], check=False)
            # podman may clean up after a failed container in the background, and mounts its storage again to do so.
            shutil.rmtree(self._folder, ignore_errors=time.monotonic() < deadline)

    def __call__(self, *arguments: str) -> str:
        """Run a command and return its standard output. Raise RuntimeError with the end of its output if it fails."""
        done = subprocess.run([*self._command, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            output = (done.stdout + done.stderr)[-5000:]
            raise RuntimeError(f"podman {' '.join(arguments)}: exit status {done.returncode}\n{output}")
        return done.stdout

    def run(self, image: str, *command: str, options: tuple[str, ...] = ()) -> str:
        """Run a command in a new container and return its standard output."""
        # podman's default limits may be above those of this process, and raising a limit takes CAP_SYS_RESOURCE.
        limits = ("--ulimit=nofile=10000:10000", "--ulimit=nproc=10000:10000")
        return self("run", "--rm", *limits, *options, image, *command)
