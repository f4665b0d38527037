"""The man pages have no error of roff, and each command has one."""

import shutil
import subprocess

import pytest

from tests.docs import man

PAGES = dict(man.pages())


@pytest.mark.skipif(
    shutil.which("groff") is None, reason="groff is missing: install the Debian package groff-base"
)
@pytest.mark.parametrize("name", PAGES)
def test_pages_have_no_warnings(name: str) -> None:
    command = ("groff", "-mandoc", "-Tutf8", "-ww", "-rLL=80n")
    ended = subprocess.run(command, input=PAGES[name], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    assert name.removesuffix(".1") in ended.stdout


def test_pages_have_options_and_exit_codes() -> None:
    page = PAGES["kubectl-pykubeproxy-trace.1"]
    assert "\\&\\-\\-via\\-node NAME" in page and ".SH EXIT STATUS" in page
    assert ".BR pykubeproxy-lab-demo (1)" in PAGES["pykubeproxy-lab.1"]
