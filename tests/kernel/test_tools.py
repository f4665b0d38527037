"""Find the iptables commands of a backend."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pykubeproxy.kernel import (
    Backend,
    Failed,
    Missing,
    Runner,
    choose_backend,
    open_iptables,
    unsupported_reason,
)
from pykubeproxy.kernel import runner as runner_module
from pykubeproxy.objects import Family

NFT, LEGACY, OLD = "iptables v1.8.9 (nf_tables)", "iptables v1.8.9 (legacy)", "iptables v1.6.1"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Runner]:
    """A machine on which only the commands given exist; each prints a version and nothing else."""
    monkeypatch.setattr(runner_module, "_SYSTEM_FOLDERS", ())

    def installed(**stems: str) -> Runner:
        for stem, version in stems.items():
            for end in ("", "-save", "-restore"):
                command = tmp_path / f"{stem.replace('_', '-')}{end}"
                command.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}"\nexit 0\n')
                command.chmod(0o755)
        return Runner(environment={"PATH": str(tmp_path)})

    return installed


def test_commands_named_for_the_backend_come_first(install: Callable[..., Runner]) -> None:
    """The plain commands are not used if iptables-nft-* or iptables-legacy-* exist."""
    runner = install(iptables=NFT, iptables_nft=NFT, iptables_legacy=LEGACY)
    legacy = open_iptables(Backend.LEGACY, Family.IPV4, runner)
    assert (legacy.tools.save, legacy.tools.restore) == ("iptables-legacy-save", "iptables-legacy-restore")
    assert legacy.tools.version == (1, 8, 9)
    assert open_iptables(Backend.NFT, Family.IPV4, runner).tools.main == "iptables-nft"


@pytest.mark.parametrize(
    ("version_line", "backend", "version"),
    [(NFT, Backend.NFT, (1, 8, 9)), (LEGACY, Backend.LEGACY, (1, 8, 9)), (OLD, Backend.LEGACY, (1, 6, 1))],
)
def test_only_plain_commands(
    install: Callable[..., Runner], version_line: str, backend: Backend, version: tuple[int, int, int]
) -> None:
    """Plain commands serve their own backend, and `auto` chooses it."""
    runner = install(iptables=version_line, ip6tables=version_line)
    opened = open_iptables(backend, Family.IPV6, runner)
    assert (opened.tools.main, opened.tools.version) == ("ip6tables", version)
    assert choose_backend("auto", runner) is backend


def test_plain_commands_of_the_other_backend(install: Callable[..., Runner]) -> None:
    """They are not used for a backend they do not support."""
    runner = install(iptables=LEGACY)
    with pytest.raises(Missing, match=r"iptables-nft-restore not found .* install the package iptables"):
        open_iptables(Backend.NFT, Family.IPV4, runner)
    with pytest.raises(Missing):
        choose_backend("nft", runner)


@pytest.mark.parametrize(("stem", "lacking"), [("iptables", Family.IPV6), ("ip6tables", Family.IPV4)])
def test_commands_of_one_family_suffice(install: Callable[..., Runner], stem: str, lacking: Family) -> None:
    """The other family is not supported."""
    runner = install(**{stem: NFT})
    assert choose_backend("nft", runner) is choose_backend("auto", runner) is Backend.NFT
    missing = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}[lacking]
    assert unsupported_reason(Backend.NFT, lacking, runner).startswith(f"{missing}-nft-restore not found")


def test_nothing_installed(install: Callable[..., Runner]) -> None:
    """The error names the package to install."""
    with pytest.raises(Missing, match="install the package iptables"):
        choose_backend("auto", install())


def test_system_directories_are_searched() -> None:
    """A PATH without sbin does not hide iptables."""
    runner = Runner(environment={"PATH": "/nowhere"})
    assert runner.has("iptables-nft-restore")
    assert open_iptables(Backend.NFT, Family.IPV4, runner).tools.version > (1, 8, 0)


def test_invalid_save_output(install: Callable[..., Runner], tmp_path: Path) -> None:
    """Output that is no ruleset raises; it is not an empty table."""
    runner = install(iptables=NFT)
    (tmp_path / "iptables-save").write_text("#!/bin/sh\necho '*nat'; echo 'Segmentation fault'\n")
    with pytest.raises(Failed, match="Segmentation fault"):
        open_iptables(Backend.NFT, Family.IPV4, runner).save()


def test_incompatible_table(install: Callable[..., Runner], tmp_path: Path) -> None:
    """A table that iptables-nft-save leaves out as incompatible is not taken for empty."""
    runner = install(iptables=NFT)
    remark = "# Table \\`nat' is incompatible, use 'nft' tool."
    (tmp_path / "iptables-save").write_text(f'#!/bin/sh\necho "{remark}"\n')
    with pytest.raises(Failed, match="nat' is incompatible"):
        open_iptables(Backend.NFT, Family.IPV4, runner).save()
