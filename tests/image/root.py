"""A Debian root file system in a folder, entered with a mount namespace and chroot. Needs root and debootstrap."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# What Debian's slim images leave out.
_SLIM = ("doc", "groff", "info", "linda", "lintian", "locale", "man")
_DPKG = "".join(f"path-exclude /usr/share/{name}/*\n" for name in _SLIM)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# How this machine reaches the network: taken along where it is set, and files that are named, too.
_NETWORK = re.compile(r"(?i)(https?|no)_proxy|(ssl_cert|pip|curl_ca|requests_ca|uv)_\w+")
# What pip may have been told in a file of this machine.
_PIP = ("cert", "index-url", "proxy", "trusted-host")
_TRUST = "/run/trust"

_ENTER = """
mount --bind "$ROOT" "$ROOT"
mount -t proc proc "$ROOT/proc"; mount --rbind /sys "$ROOT/sys"; mount --rbind /dev "$ROOT/dev"
mount -t tmpfs tmpfs "$ROOT/run"
mkdir "$ROOT/run/trust"
mount --bind /etc/resolv.conf "$ROOT/etc/resolv.conf"
eval "$EXTRA"
exec chroot "$ROOT" /usr/bin/env -i "$@"
"""


class Root:
    """One root file system; `environment` is what the recipe's ENV has set so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment: dict[str, str] = {}

    @classmethod
    def of(cls, base: str, path: Path, mirror: str) -> "Root":
        """What an image such as debian:bookworm-20260824-slim@sha256:… holds, from today's archive."""
        match = re.match(r"debian:([a-z]+)(-\d+)?-slim(@sha256:[0-9a-f]{64})?$", base)
        if not match:
            raise ValueError(f"not a slim image of Debian: {base}")
        _run(["debootstrap", "--variant=minbase", match[1], str(path), mirror], stdout=subprocess.DEVNULL)
        (path / "etc/dpkg/dpkg.cfg.d/slim").write_text(_DPKG)
        for name in _SLIM:
            for found in (path / "usr/share" / name).glob("*"):
                _remove(found)
        root = cls(path)
        root.run("apt-get clean && rm -rf /var/lib/apt/lists/*")
        return root

    def run(
        self,
        command: str,
        *,
        shared: Mapping[str, Path] | None = None,
        read_only: bool = False,
        quiet: bool = False,
    ) -> None:
        """A shell command in it. `shared` are folders of this machine to be seen read-only, by their place in it."""
        entering = self._entering(["/bin/sh", "-ec", command], shared or {}, read_only)
        _run(entering, stdout=subprocess.DEVNULL if quiet else None)

    def _entering(self, command: Sequence[str], shared: Mapping[str, Path], read_only: bool) -> list[str]:
        variables, extra = _network()
        for place, folder in shared.items():
            quoted = shlex.quote(str(folder)), f'"$ROOT"{shlex.quote(place)}'
            extra += ["mkdir -p {1}; mount --bind -o ro {0} {1}".format(*quoted)]
        if read_only:
            extra.append('mount -o remount,bind,ro "$ROOT"')
        variables |= {"PATH": _PATH, "HOME": "/root"} | self.environment
        assigned = [f"{name}={value}" for name, value in variables.items()]
        environment = [f"ROOT={self.path}", "EXTRA=" + "\n".join(extra)]
        enter = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-ec", _ENTER, "enter"]
        return ["/usr/bin/env", *environment, *enter, *assigned, *command]


def context(project: Path, folder: Path) -> Path:
    """A folder with what .dockerignore lets through of the project: it names all that is let through."""
    kept = [line[1:] for line in (project / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in kept:
        copy(project / name, folder / name, shutil.ignore_patterns("__pycache__"))
    return folder


def copy(source: Path, target: Path, ignore: Callable[[str, list[str]], set[str]] | None = None) -> None:
    """As COPY does: the contents of a folder, or a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=ignore)
    else:
        shutil.copy2(source, target)


def settings() -> dict[str, str]:
    """How this machine reaches the network, as variables: those it has, and what files tell pip."""
    listing = [sys.executable, "-m", "pip", "config", "list"]
    told = subprocess.run(listing, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, str] = {}
    for line in told.splitlines():
        name, _, value = line.partition("=")
        if (key := name.rpartition(".")[2]) in _PIP:
            found[f"PIP_{key}".upper().replace("-", "_")] = ast.literal_eval(value)
    return found | {name: value for name, value in os.environ.items() if _NETWORK.fullmatch(name)}


def _network() -> tuple[dict[str, str], list[str]]:
    """Variables to pass on, and the commands that bring along the files that they name."""
    variables: dict[str, str] = {}
    commands: list[str] = []
    for name, value in settings().items():
        if value.startswith("/"):
            if not Path(value).is_file():
                continue
            place = f"{_TRUST}/{name}"
            commands.append(f'cp {shlex.quote(value)} "$ROOT"{place}')
            value = place
        variables[name] = value
    return variables, commands


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _run(command: list[str], stdout: int | None = None) -> None:
    try:
        subprocess.run(command, check=True, stdout=stdout, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        sys.exit(f"{command[0]} is needed: install the Debian package of that name")
