"""Parse the errors of several versions of iptables-restore."""

from pathlib import Path

import pytest

from pykubeproxy.kernel import Failed, NotPermitted, Rejected
from pykubeproxy.kernel.errors import LockHeld
from pykubeproxy.kernel.restore import Input, explain
from pykubeproxy.kernel.system import lockers

TEXT = "*nat\n:A - [0:0]\n-A A -j B\n-A A -m nope -j ACCEPT\n-A A -j ACCEPT\nCOMMIT\n"


@pytest.mark.parametrize(
    ("stderr", "number", "message"),
    [
        (
            "iptables-nft-restore v1.8.9 (nf_tables): \nline 5: RULE_APPEND failed (Invalid argument): rule in chain A\n",
            5,
            "RULE_APPEND failed (Invalid argument): rule in chain A",
        ),
        (
            (
                "# Warning: iptables-legacy tables present, use iptables-legacy-save to see them\n"
                "iptables-restore v1.8.11 (nf_tables): \nline 2: CHAIN_ADD failed (No space left on device): chain A\n"
                "line 3: RULE_APPEND failed (No such file or directory): rule in chain A\n"
            ),
            2,
            "CHAIN_ADD failed (No space left on device): chain A",
        ),
        (
            "iptables-nft-restore: line 5 failed: Bad rule (does a matching rule exist in that chain?).\n",
            5,
            "Bad rule (does a matching rule exist in that chain?).",
        ),
        (
            (
                "iptables-restore v1.8.9 (legacy): Couldn't load match `nope':No such file or directory\n\n"
                "Error occurred at line: 4\nTry `iptables-restore -h' or 'iptables-restore --help' for more information.\n"
            ),
            4,
            "Couldn't load match `nope':No such file or directory",
        ),
        (
            "iptables-restore v1.4.21: Couldn't load match `nope':No such file or directory\n\nError occurred at line: 4\n",
            4,
            "Couldn't load match `nope':No such file or directory",
        ),
        (
            "Bad argument `foo'\nError occurred at line: 5\nTry `iptables-restore -h'\n",
            5,
            "Bad argument `foo'",
        ),
        (
            "iptables-nft-restore v1.8.7 (nf_tables): \nline 6: CHAIN_USER_DEL failed (Device or resource busy): chain A\n",
            6,
            "CHAIN_USER_DEL failed (Device or resource busy): chain A",
        ),
        (
            "iptables-restore: line 6 failed\n",
            6,
            "the kernel rejected the block and does not say which rule is the reason",
        ),
        (
            "Ignoring deprecated --wait-interval option.\niptables-restore: line 5 failed\n",
            5,
            "iptables does not say why",
        ),
        ("iptables-restore: COMMIT expected at line 7\n", 7, "COMMIT expected at line 7"),
        (
            "iptables-nft-restore v1.8.9 (nf_tables): Chain 'B' does not exist\nError occurred at line: 6\n",
            3,
            "Chain 'B' does not exist",
        ),
        (
            "iptables-nft-restore v1.8.9 (nf_tables): Chain 'OTHER' does not exist\nError occurred at line: 6\n",
            6,
            "Chain 'OTHER' does not exist",
        ),
    ],
)
def test_error_has_line_and_reason(stderr: str, number: int, message: str) -> None:
    """Whatever else is printed."""
    error = explain("iptables-restore", 2, stderr, "/nowhere", Input(TEXT))
    assert isinstance(error, Rejected)
    assert (error.line_number, error.message, error.exit_code) == (number, message, 2)
    assert error.line == TEXT.split("\n")[number - 1]
    assert str(number) in str(error)


@pytest.mark.parametrize(
    ("exit_code", "stderr", "text"),
    [
        (
            1,
            "iptables-nft-restore v1.8.9 (nf_tables): Could not fetch rule set generation id: Out of memory\n",
            "memory",
        ),
        (
            3,
            "iptables-restore v1.8.9 (legacy): unable to initialize table 'nat'\nError occurred at line: 1\n",
            "'nat'",
        ),
        (-11, "", "killed by signal 11"),
        (1, "", "gave no reason"),
    ],
)
def test_errors_without_a_rule_name_none(exit_code: int, stderr: str, text: str) -> None:
    error = explain("iptables-restore", exit_code, stderr, "/nowhere", Input(TEXT))
    assert isinstance(error, Failed)
    assert text in str(error)


def test_missing_privileges_are_named() -> None:
    stderr = "iptables-nft-restore v1.8.9 (nf_tables): Could not fetch rule set generation id: Permission denied (you must be root)\n"
    error = explain("iptables-nft-restore", 4, stderr, "/nowhere", Input(TEXT))
    assert isinstance(error, NotPermitted)
    assert "CAP_NET_ADMIN" in str(error)


def test_lock_holder_in_another_pid_namespace_has_no_pid() -> None:
    stderr = "Another app is currently holding the xtables lock. Stopped waiting after 5s.\n"
    error = explain("iptables-restore", 4, stderr, "/nowhere", Input(TEXT))
    assert isinstance(error, LockHeld)
    assert "not visible" in str(error)


def test_processes_that_lock_a_file_or_wait_for_it(tmp_path: Path) -> None:
    """/proc/locks lists both; a process of another pid namespace has the pid 0."""
    lock = tmp_path / "lock"
    lock.touch()
    status = lock.stat()
    place = f"{status.st_dev >> 8 & 0xFFF:02x}:{status.st_dev & 0xFF:02x}:{status.st_ino}"
    locks = tmp_path / "locks"
    locks.write_text(
        f"1: FLOCK  ADVISORY  WRITE 77 00:01:{status.st_ino + 1} 0 EOF\n"
        f"2: POSIX  ADVISORY  WRITE 78 {place} 0 EOF\n"
        f"4: FLOCK  ADVISORY  WRITE 80 {place} 0 EOF\n"
        f"4: -> FLOCK  ADVISORY  WRITE 79 {place} 0 EOF\n"
        f"4:  -> FLOCK  ADVISORY  WRITE 0 {place} 0 EOF\n"
    )
    assert lockers(lock, locks=locks) == (80,)
    assert lockers(lock, waiting=True, locks=locks) == (79, 0)
    assert lockers(tmp_path / "none", locks=locks) == ()
