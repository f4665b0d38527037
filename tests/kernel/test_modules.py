"""Load kernel modules with modprobe."""

import os
import platform
from pathlib import Path

import pytest

from pykubeproxy.kernel import Backend, Runner, load_modules
from pykubeproxy.kernel.features import required_modules


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system with modules for the running kernel."""
    (tmp_path / "lib/modules" / platform.release()).mkdir(parents=True)
    return tmp_path


def with_modprobe(folder: Path, script: str) -> Runner:
    """Return a runner with a modprobe that records its arguments."""
    (tools := folder / "tools").mkdir()
    (tools / "modprobe").write_text(f'#!/bin/sh\necho "$@" >> {folder}/arguments\n{script}\n')
    (tools / "modprobe").chmod(0o755)
    return Runner(environment={"PATH": f"{tools}:{os.environ['PATH']}"})


@pytest.mark.parametrize(
    ("backend", "tables", "others"),
    [
        (Backend.LEGACY, {"ip_tables", "ip6_tables", "iptable_nat", "ip6table_mangle"}, {"nf_tables"}),
        (Backend.NFT, {"nf_tables", "nft_compat"}, {"ip_tables", "iptable_nat"}),
    ],
    ids=["legacy", "nft"],
)
def test_loads_the_modules_of_one_backend(
    backend: Backend, tables: set[str], others: set[str], root: Path
) -> None:
    """One modprobe command names all modules, and none of the other backend."""
    load_modules(backend, with_modprobe(root, ""), root)
    option, *arguments = (root / "arguments").read_text().split()
    assert option == "--all"
    assert arguments == [*required_modules(backend)]
    assert tables | {"nf_conntrack", "xt_comment", "xt_statistic", "xt_nat", "ip6t_REJECT"} <= {*arguments}
    assert not others & {*arguments}


@pytest.mark.parametrize("script", ["exit 1", "kill -KILL $$"])
def test_a_failure_of_modprobe_is_no_error(script: str, root: Path) -> None:
    """Modules may be built in."""
    load_modules(Backend.NFT, with_modprobe(root, script), root)
    assert (root / "arguments").exists()


def test_no_modules_for_this_kernel(tmp_path: Path) -> None:
    """Without modules for the running kernel, modprobe does not run."""
    load_modules(Backend.NFT, with_modprobe(tmp_path, ""), tmp_path)
    assert not (tmp_path / "arguments").exists()


def test_no_modprobe(root: Path) -> None:
    """Without modprobe, nothing happens."""

    class Bare(Runner, frozen=True):
        def has(self, command: str) -> bool:
            return False

    load_modules(Backend.NFT, Bare(), root)
