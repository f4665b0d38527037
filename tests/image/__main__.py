"""Carries out the Dockerfile's steps in Debian root file systems, measures what comes out, and tries it.

It runs `pykubeproxy check` there, with the root file system read-only, and every conformance case on both kinds of
iptables. Takes root, debootstrap and the network; leaves nothing behind unless told to with --keep.
"""

import argparse
import gzip
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.image import dockerfile, root

DEBIAN = "http://deb.debian.org/debian"
_PROJECT = Path(__file__).parents[2]
# Megabytes, of a million bytes, as registries show them.
_MOST = 120.0


def main() -> None:
    """Build, measure, try."""
    options = argparse.ArgumentParser(prog="python -m tests.image", description=__doc__)
    options.add_argument("--mirror", default=DEBIAN, help="where Debian comes from")
    options.add_argument("--keep", type=Path, metavar="FOLDER", help="work here, and leave it")
    given = options.parse_args()
    work = given.keep or Path(tempfile.mkdtemp(prefix="image-"))
    try:
        image, entry = _build(work, given.mirror)
        size = _compressed(image.path)
        print(f"compressed {size:.1f} MB, {_MOST:.0f} are allowed", flush=True)
        if size > _MOST:
            sys.exit("the image is too large")
        _look(image.path)
        _try(image, entry)
    finally:
        if not given.keep:
            shutil.rmtree(work)


def _build(work: Path, mirror: str) -> tuple[root.Root, str]:
    """The root file system of the last stage, and its entry point."""
    sources = {"": root.context(_PROJECT, work / "context")}
    stages = dockerfile.stages((_PROJECT / "Dockerfile").read_text())
    bases: dict[str, Path] = {}
    for number, stage in enumerate(stages):
        if stage.base not in bases:
            _say(f"making {stage.base}")
            bases[stage.base] = root.Root.of(stage.base, work / f"base-{number}", mirror).path
        here = root.Root(work / f"stage-{number}")
        subprocess.run(["cp", "-a", str(bases[stage.base]), str(here.path)], check=True)
        for step in stage.steps:
            _carry_out(step, here, sources)
        sources[stage.name] = here.path
    (entry,) = stages[-1].all("ENTRYPOINT")
    return here, " ".join(entry.arguments)


def _carry_out(step: dockerfile.Step, here: root.Root, sources: dict[str, Path]) -> None:
    started = time.monotonic()
    if step.instruction == "RUN":
        here.run(step.arguments[0], quiet=True)
    elif step.instruction == "ENV":
        here.environment |= dict(it.split("=", 1) for it in step.arguments)
    elif step.instruction == "COPY":
        *names, target = step.arguments
        for name in names:
            source = sources[step.source] / name.lstrip("/")
            place = here.path / target.lstrip("/")
            root.copy(source, place / source.name if target.endswith("/") and source.is_file() else place)
    _say(f"{step.instruction} {step.arguments[0][:80]}  {time.monotonic() - started:.0f} s")


def _compressed(folder: Path) -> float:
    """In megabytes, as a layer is compressed."""
    archive = subprocess.Popen(
        ["tar", "-C", str(folder), "--numeric-owner", "--one-file-system", "-cf", "-", "."],
        stdout=subprocess.PIPE,
    )
    assert archive.stdout
    counter = _Counter()
    with gzip.GzipFile(fileobj=counter, mode="wb", compresslevel=6) as packed:
        shutil.copyfileobj(archive.stdout, packed, 1 << 20)
    assert archive.wait() == 0
    return counter.size / 1e6


class _Counter:
    """Where bytes go that only their number matters of."""

    size = 0

    def write(self, data: bytes) -> int:
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is kept."""


def _look(image: Path) -> None:
    """No compiler, no pip, no lab, and nothing of ours that anybody but root could change."""
    for pattern in (
        "usr/bin/*gcc*",
        "usr/bin/cc",
        "opt/pykubeproxy/bin/pip*",
        "opt/**/pykubeproxy/lab",
        "src",
    ):
        found = list(image.glob(pattern))
        assert not found, f"not wanted in the image: {found[0]}"
    for path in (image / "opt").rglob("*"):
        about = path.lstat()
        assert about.st_uid == about.st_gid == 0, f"not root's: {path}"
        assert path.is_symlink() or not about.st_mode & 0o022, f"others can write {path}"


def _try(image: root.Root, entry: str) -> None:
    """As in the DaemonSet: the root file system is read-only, and the agent has two capabilities."""
    shared = {"/run/tests": _PROJECT / "tests", "/run/conf": _PROJECT / "manifests/base"}
    forwarding = "echo 1 >/proc/sys/net/ipv4/ip_forward"
    agent = f"setpriv --no-new-privs --bounding-set=-all,+net_admin,+net_raw {entry} run --config=/run/conf/config.conf"
    example = "--manifests=/run/tests/data/manifests/explain.yaml --hostname-override=node1 --once"
    for what, command in (
        ("the version", f"{entry} --version"),
        ("the commands", f"{entry} --help | grep -q explain && ! {entry} lab --help"),
        ("the node", f"unshare --net sh -ec '{forwarding}; exec {entry} check'"),
        ("init-only", f"unshare --net {entry} run --init-only --config=/run/conf/config.conf"),
        ("the agent, nft", f"unshare --net {agent} {example} --iptables-backend=nft"),
        ("the agent, legacy", f"unshare --net {agent} {example} --iptables-backend=legacy"),
        ("the conformance cases", "cd /run && exec python -m tests.image.conformance"),
    ):
        _say(f"trying {what}")
        image.run(command, shared=shared, read_only=True)
    _say("all is well")


def _say(text: str) -> None:
    print(f"-- {text}", flush=True)


if __name__ == "__main__":
    main()
