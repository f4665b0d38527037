"""Write a bundle: collect its files one after the other, compressed in memory, then write them with a manifest."""

import calendar
import contextlib
import gzip
import io
import os
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from pykubeproxy.bundle.layout import MANIFEST, BundledFile, Manifest, folder_name
from pykubeproxy.rules.save_files import MOST_BYTES
from pykubeproxy.wording import without_password

_LONGEST_ERROR = 500  # characters
_GZIP = zlib.MAX_WBITS | 16  # the format of gzip, to zlib


class TooLarge(Exception):
    """A file of a bundle exceeds its limit."""


class Content:
    """The text of one file: compressed as it is collected, so that an agent's pod needs little memory for it.

    Removes user and password of the URLs in the text. A URL lies within one line.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.size = 0
        self._most = most_bytes
        self._line = bytearray()
        self._packed = io.BytesIO()
        # Not a GzipFile: Python 3.13 prints a traceback when it drops an open one.
        self._gzip = zlib.compressobj(level=1, wbits=_GZIP)

    def write(self, data: bytes) -> None:
        """Add a piece of the text. Raises TooLarge."""
        lines, newline, rest = data.rpartition(b"\n")
        if newline:
            self._add(bytes(self._line) + lines + newline)
            self._line.clear()
        self._line += rest
        if self.size + len(self._line) > self._most:
            raise TooLarge(f"it has more than {self._most >> 20} MiB")

    def write_json(self, document: object) -> None:
        """Add a value as JSON of many lines. Raises TooLarge."""
        self.write_json_text(msgspec.json.encode(document))

    def write_json_text(self, text: bytes) -> None:
        """Add a JSON document in many lines, each with one string at most. Raises TooLarge, ValueError."""
        self.write(msgspec.json.format(text) + b"\n")

    def packed(self) -> bytes:
        """Return the text, compressed with gzip."""
        self._add(bytes(self._line))
        self._line.clear()
        self._packed.write(self._gzip.flush())
        return self._packed.getvalue()

    def _add(self, text: bytes) -> None:
        if b"@" in text:
            text = without_password(text.decode("utf-8", "surrogateescape")).encode(
                "utf-8", "surrogateescape"
            )
        self.size += len(text)
        self._packed.write(self._gzip.compress(text))


class BundleSection(NamedTuple):
    """How to collect one file; `source` is the command, request or path it comes from."""

    name: str
    source: str
    collect: Callable[[Content], None]


class Member(NamedTuple):
    """A file, collected; `packed` is its text compressed with gzip, b"" if it is missing."""

    file: BundledFile
    packed: bytes = b""


def collected(
    sections: Iterable[BundleSection],
    most_bytes: int = MOST_BYTES,
    fatal: tuple[type[Exception], ...] = (),
) -> Iterator[Member]:
    """Yield each file when it has been collected. Any failure costs its own section only, unless it is `fatal`."""
    for section in sections:
        content = Content(most_bytes)
        try:
            section.collect(content)
            packed = content.packed()
        except fatal:
            raise
        except Exception as error:
            yield Member(BundledFile(section.name, section.source, error=_reason(error)))
        else:
            yield Member(BundledFile(section.name, section.source, content.size), packed)


def _reason(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
    return without_password(" ".join(text.split()))[:_LONGEST_ERROR]


def member(file: BundledFile, text: bytes) -> Member:
    """Return a file with a text that was collected before."""
    return Member(msgspec.structs.replace(file, size=len(text)), gzip.compress(text, 1))


def write_bundle(file: IO[bytes], manifest: Manifest, members: Iterable[Member]) -> None:
    """Write a bundle with these files; `manifest` lacks only them. Raises OSError."""
    members = tuple(members)
    manifest = msgspec.structs.replace(manifest, files=tuple(entry.file for entry in members))
    content = Content()
    content.write_json(manifest)
    about = Member(BundledFile(MANIFEST, "", content.size), content.packed())
    folder = folder_name(manifest.node, manifest.time)
    seconds = calendar.timegm(time.strptime(manifest.time, "%Y-%m-%dT%H:%M:%SZ"))
    with (
        gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=6, mtime=seconds) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for member in (about, *(other for other in members if not other.file.error)):
            info = tarfile.TarInfo(f"{folder}/{member.file.name}")
            info.size, info.mtime, info.mode = member.file.size, seconds, 0o600
            info.uname = info.gname = "root"
            tar.addfile(info, gzip.GzipFile(fileobj=io.BytesIO(member.packed)))


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file of mode 0600 that appears as `path` when it is complete, and never in part.

    Raises FileExistsError if there is such a file, and OSError.
    """
    if os.path.lexists(path):
        raise FileExistsError(f"{path} exists")
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:64]}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
