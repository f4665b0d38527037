"""Build the Dockerfile with podman, check the size and contents of the image, and run it as the DaemonSet does.

Needs root, podman, debootstrap, a Debian mirror and a Python package index. The base image is made from Debian packages,
with this machine's proxies and certificates, or with --pull the Dockerfile's own. Leaves the image in the storage of
podman, and its bill of materials in a folder.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pyroute2 import netns

import pykubeproxy
from tests import sbom
from tests.image.base import PROJECT, Podman, Unavailable, base_image, require_tools

IMAGE = f"localhost/pykubeproxy:{pykubeproxy.__version__}"
# Megabytes of 1,000,000 bytes, as registries show them.
_MAX_COMPRESSED = 120.0
_UNWANTED = ("usr/bin/*gcc*", "usr/bin/cc", "opt/pykubeproxy/bin/pip*", "opt/**/pykubeproxy/lab", "src")
_CONFIG = "/var/lib/kube-proxy/config.conf"
_VOLUMES = (
    f"--volume={PROJECT}/manifests/base/config.conf:{_CONFIG}:ro",
    f"--volume={PROJECT}/tests:/mnt/tests:ro",
)
_READ_ONLY = ("--read-only", "--read-only-tmpfs=false")
_AGENT = ("--cap-drop=all", "--cap-add=NET_ADMIN,NET_RAW", "--security-opt=no-new-privileges", *_READ_ONLY)
_PRIVILEGED = ("--privileged", *_READ_ONLY)
_SHELL = ("--entrypoint=/bin/sh",)


def main() -> None:
    """Run `build_and_test` and report why the image cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m tests.image", description=__doc__)
    parser.add_argument("--pull", action="store_true", help="pull the base image that the Dockerfile names")
    parser.add_argument("--archive", action="store_true", help="also write the image, as an OCI archive")
    parser.add_argument("--output", type=Path, default=PROJECT / "dist", help="the folder to write into")
    arguments = parser.parse_args()
    try:
        build_and_test(arguments.output, pull=arguments.pull, archive=arguments.archive)
    except Unavailable as reason:
        sys.exit(f"cannot build the image: {reason}")


def build_and_test(output: Path, *, pull: bool = False, archive: bool = False) -> None:
    """Build the image in a temporary folder, test it and write its files into `output`.

    Raise Unavailable if this machine cannot build it.
    """
    require_tools("podman", *(() if pull else ("debootstrap",)))
    with tempfile.TemporaryDirectory(prefix="image-") as name, Podman(Path(name, "podman")) as podman:
        folder = Path(name)
        base = () if pull else _local_base(podman, folder)
        _say("building the Dockerfile")
        options = ("--jobs=2", "--layers=false", "--network=host", "--isolation=chroot")
        podman("build", *options, *base, f"--tag={IMAGE}", str(PROJECT))
        _check_size(podman, folder / "pushed")
        name = f"pykubeproxy-{pykubeproxy.__version__}-image-{_architecture(podman)}"
        root = Path(podman("image", "mount", IMAGE).strip())
        _check_contents(root)
        _write_bill(root, output / f"{name}.cdx.json")
        podman("image", "unmount", IMAGE)
        _run_commands(podman)
        for backend in ("nft", "legacy"):
            _run_agent(podman, backend)
        _run_conformance_cases(podman)
        file = (output if archive else folder) / f"{name}.tar"
        podman("save", "--format=oci-archive", f"--output={file}", IMAGE)
        subprocess.run(
            ["podman", "load", "--quiet", f"--input={file}"], check=True, stdout=subprocess.DEVNULL
        )
    _say(f"all tests passed; podman has {IMAGE}")


def _local_base(podman: Podman, folder: Path) -> tuple[str]:
    """Make the base image and return the option that builds with it."""
    _say("making the base image from Debian packages")
    return (f"--build-arg=BASE={base_image(podman, folder)}",)


def _architecture(podman: Podman) -> str:
    return podman("image", "inspect", "--format={{.Architecture}}", IMAGE).strip()


def _check_size(podman: Podman, folder: Path) -> None:
    podman("push", "--compress", IMAGE, f"dir:{folder}")
    layers = json.loads((folder / "manifest.json").read_text())["layers"]
    size = sum(layer["size"] for layer in layers) / 1e6
    _say(f"compressed size {size:.1f} MB, limit {_MAX_COMPRESSED:.0f} MB")
    assert size <= _MAX_COMPRESSED


def _check_contents(root: Path) -> None:
    """Check that the image has no build tools and no lab, and that only root can write the program's files."""
    for pattern in _UNWANTED:
        assert not list(root.glob(pattern)), f"the image contains {pattern}"
    for path in (root / "opt").rglob("*"):
        status = path.lstat()
        assert status.st_uid == status.st_gid == 0, f"{path} does not belong to root"
        assert path.is_symlink() or not status.st_mode & 0o022, f"{path} is writable for others"


def _write_bill(root: Path, file: Path) -> None:
    """Write the bill of materials. It names the Debian packages of the Dockerfile and the pinned Python packages."""
    _say(f"writing {file.name}")
    file.write_text(sbom.image(root))
    listed = {item["purl"].partition("?")[0] for item in json.loads(file.read_text())["components"]}
    pinned = re.findall(r"^([\w.-]+)==(\S+)", (PROJECT / "requirements/node.txt").read_text(), re.MULTILINE)
    python = {item for item in listed if item.startswith("pkg:pypi/")} - {
        f"pkg:pypi/pykubeproxy@{pykubeproxy.__version__}"
    }
    assert python <= {f"pkg:pypi/{name}@{version}" for name, version in pinned}, python
    for name in ("iptables", "kmod", "python3", "libc6"):
        assert any(item.startswith(f"pkg:deb/debian/{name}@") for item in listed), f"{name} is not listed"


def _run_commands(podman: Podman) -> None:
    _say("running --version and --help")
    version = podman.run(IMAGE, "--version", options=(*_AGENT, "--network=none"))
    assert version.startswith("pykubeproxy "), version
    script = "pykubeproxy --help | grep -q explain && ! pykubeproxy lab --help 2>/dev/null"
    podman.run(IMAGE, "-ec", script, options=(*_AGENT, *_SHELL, "--network=none"))


def _run_agent(podman: Podman, backend: str) -> None:
    """Run the DaemonSet's two containers on objects from a file, then `check`, in a network namespace."""
    _say(f"running init-only, the agent and check with iptables-{backend}")
    namespace = f"image-{time.time_ns()}"
    netns.create(namespace)
    network = f"--network=ns:/run/netns/{namespace}"
    flags = (f"--config={_CONFIG}", f"--iptables-backend={backend}")
    objects = ("--manifests=/mnt/tests/data/manifests/explain.yaml", "--hostname-override=node1", "--once")
    # The containers write no files but those of locks.
    agent = (*_AGENT, *_VOLUMES, network, "--tmpfs=/run")
    try:
        script = f"echo 1 >/proc/sys/net/ipv4/ip_forward; exec pykubeproxy run --init-only {' '.join(flags)}"
        podman.run(IMAGE, "-ec", script, options=(*_PRIVILEGED, *_VOLUMES, *_SHELL, network, "--tmpfs=/run"))
        podman.run(IMAGE, "run", *flags, *objects, options=agent)
        podman.run(IMAGE, "check", *flags, options=agent)
    finally:
        netns.remove(namespace)


def _run_conformance_cases(podman: Podman) -> None:
    """Run the cases with the packages of the image; each takes a network namespace, so the container is privileged."""
    _say("running the conformance cases")
    options = (
        *_PRIVILEGED,
        *_VOLUMES,
        "--network=none",
        "--tmpfs=/run",
        "--workdir=/mnt",
        "--entrypoint=/opt/pykubeproxy/bin/python",
    )
    _say(podman.run(IMAGE, "-m", "tests.image.conformance", options=options).strip())


def _say(text: str) -> None:
    print(f"-- {text}", flush=True)


if __name__ == "__main__":
    main()
