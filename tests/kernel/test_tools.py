"""Finding the commands of a backend, whatever names a distribution gives them."""

from pathlib import Path

import pytest

from pykubeproxy.kernel import Backend, Failed, Missing, Runner, choose, open_iptables
from pykubeproxy.kernel import runner as runner_module
from pykubeproxy.objects import Family

NFT, LEGACY, OLD = "iptables v1.8.9 (nf_tables)", "iptables v1.8.9 (legacy)", "iptables v1.6.1"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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


def test_full_names_come_first(install) -> None:
    """Where commands have the backend in their name, those are used, not the plain ones."""
    runner = install(iptables=NFT, iptables_nft=NFT, iptables_legacy=LEGACY)
    legacy = open_iptables(Backend.LEGACY, Family.IPV4, runner)
    assert (legacy.tools.save, legacy.tools.restore) == ("iptables-legacy-save", "iptables-legacy-restore")
    assert legacy.tools.version == (1, 8, 9)
    assert open_iptables(Backend.NFT, Family.IPV4, runner).tools.main == "iptables-nft"


@pytest.mark.parametrize(
    ("said", "backend", "version"),
    [(NFT, Backend.NFT, (1, 8, 9)), (LEGACY, Backend.LEGACY, (1, 8, 9)), (OLD, Backend.LEGACY, (1, 6, 1))],
)
def test_only_the_plain_commands(install, said: str, backend: Backend, version: tuple[int, int, int]) -> None:
    """A distribution with one kind of iptables is served by its plain commands, and `auto` chooses that kind."""
    runner = install(iptables=said, ip6tables=said)
    opened = open_iptables(backend, Family.IPV6, runner)
    assert (opened.tools.main, opened.tools.version) == ("ip6tables", version)
    assert choose("auto", runner) is backend


def test_plain_commands_of_the_other_kind(install) -> None:
    """The plain commands are not taken for a backend that they do not speak to."""
    runner = install(iptables=LEGACY)
    with pytest.raises(Missing, match=r"iptables-nft-restore was not found .* install the package iptables"):
        open_iptables(Backend.NFT, Family.IPV4, runner)
    with pytest.raises(Missing):
        choose("nft", runner)


def test_nothing_installed(install) -> None:
    """Without any iptables the error says what to install."""
    with pytest.raises(Missing, match="install the package iptables"):
        choose("auto", install())


def test_folders_of_the_system_are_searched() -> None:
    """A PATH without sbin does not hide iptables."""
    runner = Runner(environment={"PATH": "/nowhere"})
    assert runner.has("iptables-nft-restore")
    assert open_iptables(Backend.NFT, Family.IPV4, runner).tools.version > (1, 8, 0)


def test_output_that_is_no_ruleset(install, tmp_path: Path) -> None:
    """A save command that prints something else is an error, not an empty table."""
    runner = install(iptables=NFT)
    (tmp_path / "iptables-save").write_text("#!/bin/sh\necho '*nat'; echo 'Segmentation fault'\n")
    with pytest.raises(Failed, match="Segmentation fault"):
        open_iptables(Backend.NFT, Family.IPV4, runner).save()


def test_table_that_iptables_cannot_show(install, tmp_path: Path) -> None:
    """A table with nftables' own rules, which iptables-nft-save leaves out with a remark, is not taken for empty."""
    runner = install(iptables=NFT)
    remark = "# Table \\`nat' is incompatible, use 'nft' tool."
    (tmp_path / "iptables-save").write_text(f'#!/bin/sh\necho "{remark}"\n')
    with pytest.raises(Failed, match="nat' is incompatible"):
        open_iptables(Backend.NFT, Family.IPV4, runner).save()
