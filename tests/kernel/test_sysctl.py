"""Kernel settings."""

from pathlib import Path

import pytest

from pykubeproxy.kernel import sysctl


@pytest.mark.root
def test_read_and_write(inside: str) -> None:
    """A setting of this network namespace is read, written and read again."""
    name = "net/ipv4/conf/all/route_localnet"
    assert sysctl.read(name) == "0"
    sysctl.write(name, 1)
    assert sysctl.read(name) == "1"


def test_no_such_setting(tmp_path: Path) -> None:
    """One that does not exist reads as None; writing it is an error that names it, and makes no file."""
    assert sysctl.read("net/no/such") is None
    with pytest.raises(sysctl.SysctlError, match="net/no/such to 1: No such file"):
        sysctl.write("net/no/such", "1")
    with pytest.raises(sysctl.SysctlError):
        sysctl.write("missing", "1", root=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.root
def test_bad_value(inside: str) -> None:
    """A value that the kernel does not take is an error with its reason."""
    with pytest.raises(sysctl.SysctlError, match="Invalid argument"):
        sysctl.write("net/ipv4/conf/all/route_localnet", "many")
