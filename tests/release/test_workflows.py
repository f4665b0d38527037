"""The workflows of GitHub Actions run targets that exist, in time. `make lint` checks their schema and their security."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PUBLISHING = {"contents", "packages", "id-token", "attestations"}

every_workflow = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def jobs(file: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(file.read_text())["jobs"]


def steps(file: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(file).values():
        yield from job["steps"]


def scripts(file: Path) -> list[str]:
    return [step["run"] for step in steps(file) if "run" in step]


@every_workflow
def test_workflow_runs_what_exists(file: Path) -> None:
    """Each target is in the Makefile, each path in the project, and each option of `make image` in its program."""
    for text in scripts(file):
        for target in re.findall(r"\bmake ([a-z-]+)", text):
            assert target in TARGETS
        for path in re.findall(r"(?<![\w/])\.?[\w-]+/[\w/.-]+\.(?:sh|py)\b", text):
            assert (ROOT / path).exists(), path
        for options in re.findall(r'make image OPTIONS="?([^"\n]*)', text):
            program = (ROOT / "tests/image/__main__.py").read_text()
            assert all(f'"{option}"' in program for option in options.split())


def test_ci_and_release_run_tests_packages_and_images() -> None:
    """A release is published only after all of them; images are built on both architectures."""
    for file in FILES:
        if file.stem == "nightly":
            continue
        run = "\n".join(scripts(file))
        assert {"test", "dist", "image"} <= set(re.findall(r"\bmake ([a-z-]+)", run))
        assert jobs(file)["image"]["strategy"]["matrix"]["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    (release,) = (jobs(file) for file in FILES if file.stem == "release")
    assert set(release["publish"]["needs"]) == release.keys() - {"publish"}


def test_nightly_runs_targets_that_exist() -> None:
    (nightly,) = (jobs(file) for file in FILES if file.stem == "nightly")
    assert set(nightly["long"]["strategy"]["matrix"]["target"]) == {"soak", "fuzz", "handover"} & TARGETS


def test_every_iptables_of_the_matrix_has_a_hash() -> None:
    (ci,) = (jobs(file) for file in FILES if file.stem == "ci")
    known = re.findall(
        r"^(1\.[\d.]+)\) suffix=", (ROOT / "tests/setup/iptables.sh").read_text(), re.MULTILINE
    )
    assert ci["iptables"]["strategy"]["matrix"]["version"] == known


@every_workflow
def test_only_publishing_may_write(file: Path) -> None:
    """Each job has its own permissions and a time limit."""
    for name, job in jobs(file).items():
        permissions = dict.fromkeys(PUBLISHING, "write") if name == "publish" else {"contents": "read"}
        assert job["permissions"] == permissions
        assert job["timeout-minutes"] <= 60


def test_an_action_has_the_same_commit_everywhere() -> None:
    used = {step["uses"] for file in FILES for step in steps(file) if "uses" in step}
    assert len(used) == len({action.partition("@")[0] for action in used})


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_scripts_are_valid_shell() -> None:
    text = "\n".join(f"({script}\n)" for file in FILES for script in scripts(file))
    done = subprocess.run(["shellcheck", "--shell=bash", "-"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_release_files_are_those_that_make_writes() -> None:
    """Names of files in the release workflow agree with those of `make dist` and `make image`."""
    text = (ROOT / ".github/workflows/release.yml").read_text()
    assert "FILES=dist/pykubeproxy-${GITHUB_REF_NAME#v}" in text
    assert "${wheel%-py3-*}.cdx.json" in (ROOT / "tests/setup/of-wheel.sh").read_text()
    assert 'f"pykubeproxy-{pykubeproxy.__version__}-image-' in (ROOT / "tests/image/__main__.py").read_text()


def test_push_image_prints_the_pushed_digests(tmp_path: Path) -> None:
    """It pushes each architecture and then an index of exactly these digests."""
    fakes = {
        "skopeo": '[ "$1" = inspect ] && printf index || printf "sha256:${5##*-}" >"$3"',
        "docker": "true",
    }
    for name, body in fakes.items():
        tool = tmp_path / name
        tool.write_text(f'#!/bin/sh\necho "{name} $*" >>{tmp_path}/log\n{body}\n')
        tool.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [str(ROOT / ".github/push-image.sh"), "ghcr.io/a/b", "0.1.0", "dist/x-0.1.0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    index = "sha256:1bc04b5291c26a46d918139138b992d2de976d6851d0893b0476b85bfbdfc6e6"
    assert done.stdout.splitlines() == [
        "digest-amd64=sha256:amd64",
        "digest-arm64=sha256:arm64",
        f"digest={index}",
        "name=ghcr.io/a/b",
    ]
    ran = (tmp_path / "log").read_text().splitlines()
    assert "oci-archive:dist/x-0.1.0-image-arm64.tar docker://ghcr.io/a/b:0.1.0-arm64" in ran[1]
    assert ran[2] == (
        "docker buildx imagetools create --tag ghcr.io/a/b:0.1.0 ghcr.io/a/b@sha256:amd64 ghcr.io/a/b@sha256:arm64"
    )
