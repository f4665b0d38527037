"""The kernel never routes to loopback addresses before a rule guards them (CVE-2020-8558)."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubeproxy.kernel import system
from tests.fakes.cluster import node, server
from tests.fakes.process import HEALTH, answers, inside_a_namespace, pykubeproxy, running, saved, tool
from tests.fakes.waiting import eventually

pytestmark = [pytest.mark.root, pytest.mark.parametrize("backend", ["nft", "legacy"])]

SETTING = "net/ipv4/conf/all/route_localnet"
GUARD = "-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8"
JUMP = "-A INPUT -j KUBE-FIREWALL"


@pytest.fixture
def namespace() -> Iterator[str]:
    with inside_a_namespace() as name:
        yield name


def observing(folder: Path, backend: str) -> dict[str, str]:
    """Return an environment in which each iptables command first notes the setting, and whether the guard exists.

    iptables-restore fails while the file `broken` exists.
    """
    main = f"iptables-{backend}"
    environment: dict[str, str] = {}
    for name in (main, f"{main}-save", f"{main}-restore"):
        failing = f"[ -e {folder}/broken ] && echo broken >&2 && exit 4" if name.endswith("restore") else ""
        script = (
            f"$(dirname $real)/{main} -w -S KUBE-FIREWALL 2>&1 | grep -q 'block incoming' && guard=guarded\n"
            f'echo "$(cat /proc/sys/{SETTING}) $guard" >>{folder}/seen\n{failing}\nexec $real "$@"'
        )
        environment |= tool(folder, name, script)
    return environment | {"XTABLES_LOCKFILE": str(folder / "lock")}


def flags(backend: str, url: str) -> tuple[str, ...]:
    quiet = ("--conntrack-max-per-core=0", "--oom-score-adj=0")
    return ("--hostname-override=node1", f"--iptables-backend={backend}", "--master", url, *quiet)


def init_only(folder: Path, backend: str) -> str:
    """Run --init-only and return its log."""
    environment = {**os.environ, **observing(folder, backend)}
    arguments = ("run", "--init-only", *flags(backend, "http://127.0.0.1:1"))
    return pykubeproxy(*arguments, check=True, env=environment).stderr


def seen(folder: Path) -> list[str]:
    """Return the setting and the guard before each command, without repetitions."""
    return list(dict.fromkeys(line.strip() for line in (folder / "seen").read_text().splitlines()))


def guarded(backend: str) -> bool:
    rules = saved(f"iptables-{backend}-save")
    return JUMP in rules and any(rule.startswith(GUARD) for rule in rules)


def test_an_agent_guards_loopback_addresses_first(backend: str, namespace: str, tmp_path: Path) -> None:
    with server() as api:
        api.store.create(node("node1", "192.168.99.10"))
        environment = observing(tmp_path, backend)
        with running(tmp_path / "log", *flags(backend, api.url), environment=environment):
            eventually(lambda: system.read_setting(SETTING) == "1")
            assert guarded(backend)
            eventually(lambda: answers(HEALTH, "/readyz", 200))
    assert seen(tmp_path)[:2] == ["0", "0 guarded"]
    assert "1" not in seen(tmp_path)


def test_init_only_guards_loopback_addresses_first(backend: str, namespace: str, tmp_path: Path) -> None:
    """The agent itself may not be permitted to change the setting."""
    init_only(tmp_path, backend)
    assert (system.read_setting(SETTING), guarded(backend)) == ("1", True)
    assert "1" not in seen(tmp_path)


def test_without_a_guard_the_setting_stays_off(backend: str, namespace: str, tmp_path: Path) -> None:
    """A warning says so. The agent sets it after its first sync, if permitted."""
    (tmp_path / "broken").touch()
    log = init_only(tmp_path, backend)
    assert "loopback guard failed" in log
    assert (system.read_setting(SETTING), guarded(backend)) == ("0", False)
    with server() as api, running(tmp_path / "log", *flags(backend, api.url)):
        api.store.create(node("node1", "192.168.99.10"))
        eventually(lambda: system.read_setting(SETTING) == "1")
        assert guarded(backend)


def test_the_setting_of_another_program_is_guarded_at_the_start(
    backend: str, namespace: str, tmp_path: Path
) -> None:
    """Even while the API server cannot be reached."""
    system.write_setting(SETTING, 1)
    environment = {"XTABLES_LOCKFILE": str(tmp_path / "lock")}
    with running(tmp_path / "log", *flags(backend, "http://127.0.0.1:1"), environment=environment):
        eventually(lambda: guarded(backend))
