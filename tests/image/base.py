"""Run podman as root with storage of its own, and make the Dockerfile's base image from Debian packages.

No image registry is needed.
"""

import ast
import os
import re
import shutil
import ssl
import subprocess
import sys
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


PROJECT = Path(__file__).parents[2]
# What Debian's slim images leave out.
_LEFT_OUT = tuple(f"usr/share/{name}" for name in ("doc", "groff", "info", "lintian", "locale", "man"))
_CERTIFICATES = "etc/machine.crt"
_PIP_SETTINGS = ("cert", "index-url", "proxy", "trusted-host")


class Unavailable(Exception):
    """The image cannot be built on this machine; `str()` gives the reason."""


def base_image(podman: Podman, folder: Path) -> str:
    """Import a base image of the Dockerfile's Debian release and return its name. Raise Unavailable."""
    release, settings = _release(), _pip_settings()
    _require_package_index(settings, folder)
    root = folder / "base"
    _debootstrap(release, root)
    _slim(root)
    _configure_network(root, settings)
    name = f"localhost/debian:{release}-slim"
    archive = folder / "base.tar"
    excluded = ("./proc/*", "./sys/*", "./var/cache/apt/*", "./var/lib/apt/lists/*")
    subprocess.run(
        ["tar", *(f"--exclude={item}" for item in excluded), "-C", root, "-cf", archive, "."], check=True
    )
    podman("import", str(archive), name)
    return name


def require_tools(*tools: str) -> None:
    """Raise Unavailable if a command is missing."""
    for tool in tools:
        if not shutil.which(tool):
            raise Unavailable(f"{tool} is not installed")


def _release() -> str:
    """Return the code name of the Debian release that the Dockerfile starts from."""
    match = re.search(
        r"^ARG BASE=docker\.io/library/debian:([a-z]+)-\d+-slim@",
        (PROJECT / "Dockerfile").read_text(),
        re.MULTILINE,
    )
    assert match, "the Dockerfile's BASE is not a dated slim image of Debian"
    return match[1]


def _debootstrap(release: str, root: Path) -> None:
    command = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(RELEASE) $(COMPONENT) $(REPO_URI)"]
    sources = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    prefix = f"Debian {release} main "
    mirror = next((line.removeprefix(prefix) for line in sources if line.startswith(prefix)), None)
    if not mirror:
        raise Unavailable(f"apt has no source for Debian {release}; add one and run apt-get update")
    command = ["debootstrap", "--variant=minbase", release, str(root), mirror]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"debootstrap failed: {(done.stdout + done.stderr)[-500:].strip()}")


def _slim(root: Path) -> None:
    """Set dpkg up as in Debian's slim images and remove what they leave out."""
    dpkg = "".join(f"path-exclude /{name}/*\n" for name in _LEFT_OUT)
    (root / "etc/dpkg/dpkg.cfg.d/slim").write_text(f"{dpkg}force-unsafe-io\n")
    for name in _LEFT_OUT:
        shutil.rmtree(root / name, ignore_errors=True)


def _pip_settings() -> dict[str, str]:
    """Return how pip reaches its index on this machine, and which certificates it trusts."""
    settings: dict[str, str] = {}
    command = [sys.executable, "-m", "pip", "config", "list"]
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        # Such as :env:.cert='/path'; settings from the environment come first and win.
        name, _, value = line.partition("=")
        settings.setdefault(name.rpartition(".")[2], ast.literal_eval(value))
    if certificates := ssl.get_default_verify_paths().cafile:
        settings.setdefault("cert", certificates)
    return {name: value for name, value in settings.items() if name in _PIP_SETTINGS}


def _require_package_index(settings: dict[str, str], folder: Path) -> None:
    """Raise Unavailable if pip cannot download a package with these settings alone."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {f"PIP_{name.upper().replace('-', '_')}": value for name, value in settings.items()}
    environment["PIP_CONFIG_FILE"] = os.devnull
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        "hatchling",
    ]
    if subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, check=False).returncode:
        raise Unavailable("pip cannot reach the package index")


def _configure_network(root: Path, pip: dict[str, str]) -> None:
    """Give apt and pip in the image the proxies, certificates and package index of this machine."""
    command = ["apt-config", "dump", "Acquire::http", "Acquire::https"]
    apt = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "cert" in pip:
        shutil.copy(pip["cert"], root / _CERTIFICATES)
        pip = pip | {"cert": f"/{_CERTIFICATES}"}
        apt += f'Acquire::https::CAInfo "/{_CERTIFICATES}";\n'
    (root / "etc/apt/apt.conf.d/90-machine").write_text(apt)
    (root / "etc/pip.conf").write_text(
        "[global]\n" + "".join(f"{name} = {value}\n" for name, value in pip.items())
    )
