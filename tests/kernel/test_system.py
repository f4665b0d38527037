"""Read and write kernel settings."""

from pathlib import Path

import pytest

from pykubeproxy.kernel import system


@pytest.mark.root
def test_read_and_write_a_setting(inside: str) -> None:
    """A written value is read back."""
    name = "net/ipv4/conf/all/route_localnet"
    assert system.read_setting(name) == "0"
    system.write_setting(name, 1)
    assert system.read_setting(name) == "1"


def test_missing_setting(tmp_path: Path) -> None:
    """It reads as None; writing it raises, names it and creates no file."""
    assert system.read_setting("net/no/such") is None
    with pytest.raises(system.SettingError, match="net/no/such to 1: No such file"):
        system.write_setting("net/no/such", "1")
    with pytest.raises(system.SettingError):
        system.write_setting("missing", "1", root=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.root
def test_invalid_value(inside: str) -> None:
    """A value that the kernel rejects raises with its reason."""
    with pytest.raises(system.SettingError, match="Invalid argument"):
        system.write_setting("net/ipv4/conf/all/route_localnet", "many")
