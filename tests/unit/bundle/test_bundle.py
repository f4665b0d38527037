"""Bundles: what was collected is read back, and a file from elsewhere does no harm."""

import gzip
import io
import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from pykubeproxy.bundle import layout, read
from pykubeproxy.bundle.layout import MANIFEST, METRICS, ROUTES, STATUS, BundledFile, Manifest, folder_name
from pykubeproxy.bundle.read import Bundle, InvalidBundle, read_bundle
from pykubeproxy.bundle.write import Content, TooLarge, collected, new_file
from tests.fakes.bundles import NODE, TIME, failing, section, written

TABLES = layout.TABLES[0]


def read_back(raw: bytes) -> Bundle:
    return read_bundle(io.BytesIO(raw), "b.tar.gz")


def error_of(raw: bytes) -> str:
    with pytest.raises(InvalidBundle) as caught:
        read_back(raw)
    return str(caught.value)


def packed(
    *members: tuple[str, bytes], kind: bytes = tarfile.REGTYPE, form: int = tarfile.USTAR_FORMAT
) -> bytes:
    """A tar.gz that another program made."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", format=form) as tar:
        for name, text in members:
            info = tarfile.TarInfo(name)
            info.size, info.type, info.mtime = len(text), kind, 1.5
            tar.addfile(info, io.BytesIO(text))
    return file.getvalue()


def manifest(format_: int = 1, version: str = "0.1.0") -> tuple[str, bytes]:
    return f"x/{MANIFEST}", b'{"format": %d, "version": "%s", "node": "n", "time": ""}' % (
        format_,
        version.encode(),
    )


def test_files_are_read_back_with_their_manifest() -> None:
    text = b"*nat\nCOMMIT\n"
    bundle = read_back(written([section(TABLES, text), section(STATUS, b"{}"), section(METRICS, b"x 1\n")]))
    assert bundle.files[TABLES] == text
    assert bundle.files[STATUS] == b"{}"
    assert METRICS not in bundle.files  # no command reads it
    files = (BundledFile(TABLES, "test", 12), BundledFile(STATUS, "test", 2), BundledFile(METRICS, "test", 4))
    assert bundle.manifest == Manifest(version="0.1.0", node=NODE, time=TIME, files=files)


def test_tar_lists_one_folder_of_files_that_only_root_may_read() -> None:
    raw = written([section(TABLES, b"x"), section(METRICS, b"y")])
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        members = tar.getmembers()
    folder = "pykubeproxy-bundle-node1-20260131T120000Z"
    assert [it.name for it in members] == [f"{folder}/{it}" for it in (MANIFEST, TABLES, METRICS)]
    assert {(it.mode, it.uid, it.gid, it.uname, it.mtime) for it in members} == {
        (0o600, 0, 0, "root", 1769860800)
    }


def test_same_contents_make_the_same_bytes() -> None:
    assert written([section(TABLES, b"x")]) == written([section(TABLES, b"x")])


def test_failing_section_costs_only_its_own_file() -> None:
    secret = OSError("cannot  reach https://user:hunter2@proxy:3128\nat all")
    bundle = read_back(written([failing(STATUS, secret), section(TABLES, b"x"), failing(ROUTES, KeyError())]))
    assert bundle.files.keys() == {MANIFEST, TABLES}
    errors = {it.name: it.error for it in bundle.manifest.files}
    assert errors == {STATUS: "cannot reach https://proxy:3128 at all", TABLES: "", ROUTES: "KeyError"}
    assert bundle.why_missing(STATUS) == errors[STATUS]
    assert bundle.routes() == ()


def test_failing_section_prints_no_traceback() -> None:
    """Python 3.13 prints one for a GzipFile that nobody closed."""
    program = (
        "from pykubeproxy.bundle.write import *; list(collected([BundleSection('a', '', lambda _: 1 / 0)]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_file_that_is_too_large_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    content = Content(10)
    content.write(b"12345\n")
    with pytest.raises(TooLarge):
        content.write(b"123456")
    with pytest.raises(TooLarge):
        Content(10).write(b"1\n" * 6)


def test_file_with_more_values_than_an_agent_has_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of three characters takes a hundred times its size in memory."""
    monkeypatch.setattr(read, "_MOST_COMMAS", 30)
    assert read_back(written([section(STATUS, b"[%s[]]" % (b"[]," * 30))])).files
    with pytest.raises(InvalidBundle, match=r"statusz\.json has more than 30 values"):
        read_back(written([section(STATUS, b"[%s[]]" % (b"[]," * 31))]))


@pytest.mark.parametrize("pieces", [1, 7, 4096])
def test_passwords_of_urls_are_removed_however_the_text_comes(pieces: int) -> None:
    text = b"a http://user:hunter2@host/ b\n" * 3 + b"@ \xff //x:hunter2@y"
    content = Content()
    for start in range(0, len(text), pieces):
        content.write(text[start : start + pieces])
    expected = b"a http://host/ b\n" * 3 + b"@ \xff //y"
    assert gzip.decompress(content.packed()) == expected
    assert content.size == len(expected)


def test_json_stays_whole_when_passwords_are_removed() -> None:
    """In one line, the address of one string and the @ of another look like a URL with a password."""
    content = Content()
    content.write_json({"a": ["//x", "b@c", "http://u:hunter2@h"], "//k": "@"})
    assert (
        gzip.decompress(content.packed()).split()
        == b'{ "a": [ "//x", "b@c", "http://h" ], "//k": "@" }'.split()
    )


def test_names_are_safe_for_any_node() -> None:
    assert folder_name("../../etc\x1b", TIME) == "pykubeproxy-bundle-etc-20260131T120000Z"
    assert folder_name("", TIME) == "pykubeproxy-bundle-20260131T120000Z"
    assert len(folder_name("n" * 253, TIME)) < 100
    read_back(written([section(TABLES, b"x")], node="n" * 253))


def test_file_appears_when_it_is_complete_and_replaces_none(tmp_path: Path) -> None:
    path = tmp_path / "b.tar.gz"
    with pytest.raises(RuntimeError), new_file(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with new_file(path) as file:
        file.write(b"whole")
        assert not path.exists()
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"whole", 0o600)
    with pytest.raises(FileExistsError), new_file(path):
        pass
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(FileExistsError), new_file(tmp_path / "link"):
        pass


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("prefix", ["", "./", "./folder/", "/etc/", "../../"])
def test_bundle_that_was_packed_again_is_read(prefix: str, form: int) -> None:
    name, text = manifest()
    raw = packed(
        (f"{prefix}{TABLES}", b"x"), (f"{prefix}{name[2:]}", text), (f"{prefix}unknown", b"y"), form=form
    )
    bundle = read_back(raw)
    assert (bundle.manifest.node, bundle.files[TABLES]) == ("n", b"x")
    assert "unknown" not in bundle.files


def test_cut_and_damaged_bundles_are_errors() -> None:
    raw = written([section(TABLES, os.urandom(5000).hex().encode())])
    for length in (0, 5, 100, len(raw) // 2, len(raw) - 4):
        assert "is cut short; copy it again" in error_of(raw[:length])
    for place in range(20, len(raw), 101):
        damaged = raw[:place] + bytes((raw[place] ^ 0xFF,)) + raw[place + 1 :]
        assert "b.tar.gz is" in error_of(damaged)
    for rules in (b"*nat\nCOMMIT\n", gzip.compress(b"x" * 2000)):
        assert "is no bundle" in error_of(rules)
        assert "use --rules for output of iptables-save" in error_of(rules)
    assert "has no manifest.json" in error_of(packed((TABLES, b"x")))


def test_links_and_repeated_names_are_not_followed() -> None:
    name, text = manifest()
    assert f"it has {TABLES} twice" in error_of(
        packed((name, text), (TABLES, b"x"), (f"other/{TABLES}", b"y"))
    )
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE):
        assert "has no manifest.json" in error_of(packed((name, b""), kind=kind))


def test_bombs_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(read, "_MOST_UNPACKED", 4 << 20)
    monkeypatch.setattr(read, "_MOST_WANTED", 1 << 20)
    zeros = bytes(1 << 20)
    assert "has more than 1 MiB" in error_of(packed(manifest(), (TABLES, zeros + b"x")))
    assert "when unpacked" in error_of(packed(*((f"u{n}", zeros) for n in range(5)), manifest()))
    assert "files have more than" in error_of(packed((TABLES, zeros), manifest()))
    assert "does not end" in error_of(packed(manifest()) + gzip.compress(bytes(5 << 20)))
    assert "more than 1000 files" in error_of(packed(*((f"u{n}", b"") for n in range(1001))))
    header = bytearray(tarfile.TarInfo(TABLES).tobuf())
    header[124:136] = b"\x80" + b"\x7f" * 11
    header[148:156] = b"%06o\0 " % (256 + sum(header[:148]) + sum(header[156:]))
    assert "is damaged" in error_of(gzip.compress(bytes(header)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (manifest(2, "9.9")[1], "has format 2 of pykubeproxy 9.9"),
        (b'{"format": 1}', "manifest.json is damaged"),
        (b"[" * 100_000, "manifest.json is damaged"),
        (b"\xff", "manifest.json is damaged"),
    ],
)
def test_other_manifests_are_errors(text: bytes, message: str) -> None:
    assert message in error_of(packed((MANIFEST, text)))


def test_wrong_addresses_and_routes_are_errors() -> None:
    bad = {
        layout.ADDRESSES: b'[{"address": "x", "prefixLength": 1, "interface": ""}]',
        ROUTES: b'[{"table": 254, "network": "1/99"}]',
    }
    for text in (None, b"[" * 100_000, b"{}"):
        bundle = read_back(packed(manifest(), *((name, text or wrong) for name, wrong in bad.items())))
        for method in (bundle.addresses, bundle.routes):
            with pytest.raises(InvalidBundle, match="is damaged"):
                method()


def test_sections_are_collected_one_after_the_other() -> None:
    """So that progress can be shown."""
    found = collected([section(TABLES, b"x"), section(STATUS, b"y")])
    assert next(found).file.name == TABLES
