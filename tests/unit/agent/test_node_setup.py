"""The kernel settings of a configuration, written only where they differ."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs

from pykubeproxy.agent import node_setup
from pykubeproxy.agent.node_setup import set_up, settings
from pykubeproxy.cli import logs
from pykubeproxy.cli import run as run_command
from pykubeproxy.config import Config, load
from pykubeproxy.kernel import Backend, Missing

CONNTRACK = "proc/sys/net/netfilter/nf_conntrack_"
MAX = f"{CONNTRACK}max"
HASHSIZE = "sys/module/nf_conntrack/parameters/hashsize"
OOM = "proc/self/oom_score_adj"


def config(**flags: str) -> Config:
    """Return a configuration with these flags, `_` for `-`, and all other settings disabled."""
    off = {
        "conntrack-max-per-core": "0",
        "conntrack-tcp-timeout-established": "0",
        "conntrack-tcp-timeout-close-wait": "0",
        "iptables-localhost-nodeports": "false",
    }
    return load(None, {**off, **{name.replace("_", "-"): value for name, value in flags.items()}}).config


def values(of: Config, cores: int = 4) -> dict[str, int]:
    return {it.path: it.value for it in settings(of, cores) if it.path != OOM}


def tree(root: Path, **files: int) -> Path:
    """Create a fake /proc and /sys with wrong values, except for `files` by last name."""
    present = {MAX: 65536, HASHSIZE: 1000, OOM: 0}
    for path, value in present.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{files.get(Path(path).name, value)}\n")
    return root


def test_defaults() -> None:
    """The defaults equal kube-proxy's."""
    assert {it.path: it.value for it in settings(load(None, {}).config, 4)} == {
        MAX: 131072,
        HASHSIZE: 32768,
        f"{CONNTRACK}tcp_timeout_established": 86400,
        f"{CONNTRACK}tcp_timeout_close_wait": 3600,
        OOM: -999,
    }


@pytest.mark.parametrize(
    ("per_core", "least", "cores", "expected"),
    [
        ("32768", "131072", 2, 131072),
        ("32768", "131072", 8, 262144),
        ("32768", "131072", 64, 1048576),
        ("1", "2097152", 1, 2097152),
        ("32768", "2097152", 64, 2097152),
        ("32768", "0", 1, 32768),
        ("0", "131072", 64, None),
    ],
)
def test_table_size(per_core: str, least: str, cores: int, expected: int | None) -> None:
    """Entries per core, at most 1048576, but never below the minimum; none per core disables it."""
    found = values(config(conntrack_max_per_core=per_core, conntrack_min=least), cores)
    assert found.get(MAX) == expected
    assert found.get(HASHSIZE) == (expected // 4 if expected else None)


def test_timeouts() -> None:
    """In whole seconds, at least 1; zero leaves the kernel's value."""
    assert values(config()) == {}
    given = config(
        conntrack_tcp_timeout_established="2h",
        conntrack_tcp_timeout_close_wait="1m30s",
        conntrack_udp_timeout="500ms",
        conntrack_udp_timeout_stream="2500ms",
        conntrack_tcp_be_liberal="true",
    )
    assert values(given) == {
        f"{CONNTRACK}tcp_timeout_established": 7200,
        f"{CONNTRACK}tcp_timeout_close_wait": 90,
        f"{CONNTRACK}udp_timeout": 1,
        f"{CONNTRACK}udp_timeout_stream": 2,
        f"{CONNTRACK}tcp_be_liberal": 1,
    }


def test_differing_values_are_written(tmp_path: Path) -> None:
    """Each change is logged."""
    root = tree(tmp_path)
    asked = config(conntrack_max_per_core="1", conntrack_min="100000")
    with capture_logs() as logs:
        set_up(asked, root)
    written = {it: (root / it).read_text().splitlines()[0] for it in (MAX, HASHSIZE, OOM)}
    assert written == {MAX: "100000", HASHSIZE: "25000", OOM: "-999"}
    assert [(line["setting"], line["value"], line["was"]) for line in logs] == [
        (f"/{MAX}", 100000, "65536"),
        (f"/{HASHSIZE}", 25000, "1000"),
        (f"/{OOM}", -999, "0"),
    ]


def test_the_conntrack_table_never_shrinks(tmp_path: Path) -> None:
    """A higher limit or number of buckets stays."""
    root = tree(tmp_path, nf_conntrack_max=500000, hashsize=400000)
    set_up(config(conntrack_max_per_core="1", conntrack_min="100000"), root)
    assert (root / MAX).read_text() == "500000\n"
    assert (root / HASHSIZE).read_text() == "400000\n"


def test_correct_values_are_not_written(tmp_path: Path) -> None:
    """The files are not even opened for writing."""
    asked = config(conntrack_max_per_core="1", conntrack_min="65536")
    root = tree(tmp_path, hashsize=16384, oom_score_adj=-999)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    with capture_logs() as logs:
        set_up(asked, root)
    assert not logs
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_a_missing_setting_is_logged(tmp_path: Path) -> None:
    """The warning has setting, value and advice."""
    root = tree(tmp_path)
    with capture_logs() as logs:
        set_up(config(conntrack_udp_timeout="30s", oom_score_adj="0"), root)
    (line,) = logs
    assert line["log_level"] == "warning"
    assert line["setting"] == f"/{CONNTRACK}udp_timeout"
    assert line["value"] == 30
    assert line["error"] == "No such file or directory"
    assert line["advice"] == "load the kernel module nf_conntrack"


def test_an_unreadable_value_is_overwritten(tmp_path: Path) -> None:
    """A value that is not a number counts as different."""
    root = tree(tmp_path)
    (root / OOM).write_text("\n")
    set_up(config(oom_score_adj="5"), root)
    assert (root / OOM).read_text().startswith("5")


def test_modules_of_the_chosen_backend_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Backend] = []
    monkeypatch.setattr(node_setup, "choose_backend", lambda wanted: {"legacy": Backend.LEGACY}[wanted])
    monkeypatch.setattr(node_setup, "load_modules", asked.append)
    assert node_setup.prepare_backend(config(iptables_backend="legacy")) is Backend.LEGACY
    assert asked == [Backend.LEGACY]


def test_init_only_without_iptables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning; the settings are applied."""
    made: list[Config] = []

    def missing(_: Config) -> Backend:
        raise Missing("iptables-restore", "iptables")

    monkeypatch.setattr(node_setup, "prepare_backend", missing)
    monkeypatch.setattr(node_setup, "set_up", made.append)
    monkeypatch.setattr(logs, "set_up", lambda _: None)
    with capture_logs() as lines:
        assert CliRunner().invoke(run_command.run, ["--init-only"]).exit_code == 0
    assert len(made) == 1
    assert ["iptables-restore not found" in str(line.get("error")) for line in lines] == [True]
