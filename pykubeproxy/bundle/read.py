"""Read a bundle. It may come from anywhere: sizes are bounded, and nothing is written to disk.

`tarfile` decodes single headers only. It reads extended headers of any size into memory before a caller sees them: a
file of 1.3 MiB takes 500 MiB and 9 s that way, and 4 MiB and 0.7 s here, where such headers are skipped.
"""

import gzip
import ipaddress
import tarfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from typing import IO, TypeVar

import msgspec

import pykubeproxy
from pykubeproxy.bundle.layout import (
    ADDRESSES,
    FLOWS,
    FORMAT,
    MANIFEST,
    NFT_RULESET,
    OBJECTS,
    ROUTES,
    STATUS,
    TABLES,
    Manifest,
)
from pykubeproxy.kernel.network import LocalAddress, TableRoute
from pykubeproxy.rules.save_files import MOST_BYTES

# The files that commands use. Others are for people, and for later versions.
USED = frozenset((*TABLES, NFT_RULESET, ADDRESSES, ROUTES, FLOWS, STATUS, OBJECTS))
_BLOCK = 512  # bytes, of a tar
_PIECE = 1 << 16
_MOST_MANIFEST = 1 << 20
_MOST_WANTED = 512 << 20  # bytes of the wanted files in all
_MOST_UNPACKED = 2 << 30
_MOST_MEMBERS = 1000
_MOST_COMMAS = 6_000_000  # of a file in JSON: each value takes memory, however short its text is
_COPY_AGAIN = "copy it again, or run `pykubeproxy bundle` again"
_MAIN_TABLE = 254

_T = TypeVar("_T")


class InvalidBundle(ValueError):
    """A file is no bundle that this version can read. The message names the file and what to do."""


class Bundle(msgspec.Struct, frozen=True):
    """A bundle and its files by name, as far as they were wanted. `name` is that of the bundle's file."""

    name: str
    manifest: Manifest
    files: Mapping[str, bytes]

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of the node's interfaces; none if the bundle does not have them. Raises InvalidBundle."""
        found = self._decoded(ADDRESSES, tuple[LocalAddress, ...]) or ()
        try:
            return tuple(str(ipaddress.ip_address(address.address)) for address in found)
        except ValueError as error:
            raise self._damaged(ADDRESSES, error) from None

    def routes(self) -> tuple[TableRoute, ...]:
        """Return the routes of the main table; none if the bundle does not have them. Raises InvalidBundle."""
        found = self._decoded(ROUTES, tuple[TableRoute, ...]) or ()
        try:
            return tuple(
                msgspec.structs.replace(route, network=str(ipaddress.ip_network(route.network, strict=False)))
                for route in found
                if route.table == _MAIN_TABLE
            )
        except ValueError as error:
            raise self._damaged(ROUTES, error) from None

    def why_missing(self, name: str) -> str:
        """Return why a file is missing."""
        known = next((file.error for file in self.manifest.files if file.name == name), "")
        return known or "it was not collected"

    def _decoded(self, name: str, type_: type[_T]) -> _T | None:
        if name not in self.files:
            return None
        try:
            return msgspec.json.decode(self.files[name], type=type_)
        except (ValueError, RecursionError) as error:
            raise self._damaged(name, error) from None

    def _damaged(self, name: str, error: Exception) -> InvalidBundle:
        return InvalidBundle(f"{self.name}: {name} is damaged: {error}; {_COPY_AGAIN}")


def read_bundle(file: IO[bytes], name: str, wanted: Collection[str] = USED) -> Bundle:
    """Read the wanted files of a bundle, with the manifest; `name` is for messages. Raises InvalidBundle, OSError."""
    files: dict[str, bytes] = {}
    size = 0
    try:
        with gzip.GzipFile(fileobj=file) as unpacked:
            for path, content in _members(_Bounded(unpacked), {MANIFEST, *wanted}):
                if path in files:
                    raise _Malformed(f"it has {path} twice")
                files[path] = content
                size += len(content)
                if size > _MOST_WANTED:
                    raise _Malformed(f"its files have more than {_MOST_WANTED >> 20} MiB")
    except EOFError:
        raise InvalidBundle(f"{name} is cut short; {_COPY_AGAIN}") from None
    except (gzip.BadGzipFile, tarfile.HeaderError) as error:
        if files:
            raise InvalidBundle(f"{name} is damaged: {error}; {_COPY_AGAIN}") from None
        raise InvalidBundle(
            f"{name} is no bundle: {error}; give a file that `pykubeproxy bundle` made, or use --rules for output of"
            " iptables-save"
        ) from None
    except (_Malformed, zlib.error) as error:
        raise InvalidBundle(f"{name} is damaged: {error}; {_COPY_AGAIN}") from None
    return Bundle(name, _manifest(name, files), files)


class _Malformed(Exception):
    """A tar has no valid form, or is too large."""


class _Bounded:
    """An unpacked stream of limited size."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file = file
        self._left = _MOST_UNPACKED

    def read(self, size: int) -> bytes:
        """Return exactly so many bytes. Raises EOFError, _Malformed."""
        self._left -= size
        if self._left < 0:
            raise _Malformed(f"it has more than {_MOST_UNPACKED >> 20} MiB when unpacked")
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError
        return data

    def skip(self, size: int) -> None:
        """Read so many bytes and drop them. Raises as `read` does."""
        for start in range(0, size, _PIECE):
            self.read(min(_PIECE, size - start))

    def finish(self) -> None:
        """Read to the end, which checks the sum of all bytes. Raises EOFError, _Malformed."""
        while data := self._file.read(_PIECE):
            self._left -= len(data)
            if self._left < 0:
                raise _Malformed("it does not end")


def _members(stream: _Bounded, wanted: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the wanted files of a tar by name. Ignore folders, links, extended headers and all other files."""
    for _ in range(_MOST_MEMBERS):
        header = stream.read(_BLOCK)
        if not any(header):
            stream.finish()
            return
        info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        if info.size < 0:
            raise _Malformed(f"the size of {info.name!r} is negative")
        name = info.name.rpartition("/")[2]
        size = info.size if info.type not in _WITHOUT_DATA else 0
        if info.isreg() and name in wanted:
            most = _MOST_MANIFEST if name == MANIFEST else MOST_BYTES
            if size > most:
                raise _Malformed(f"{name} has more than {most >> 20} MiB")
            content = stream.read(size)
            if name.endswith(".json") and content.count(b",") > _MOST_COMMAS:
                raise _Malformed(f"{name} has more than {_MOST_COMMAS:,} values")
            yield name, content
        else:
            stream.skip(size)
        stream.skip(-size % _BLOCK)
    raise _Malformed(f"it has more than {_MOST_MEMBERS} files")


_WITHOUT_DATA = (
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
)


class _ManifestHead(msgspec.Struct):
    """What manifests of all formats have."""

    format: int
    version: str = ""


def _manifest(name: str, files: Mapping[str, bytes]) -> Manifest:
    if MANIFEST not in files:
        raise InvalidBundle(f"{name} has no {MANIFEST}; give a file that `pykubeproxy bundle` made")
    try:
        form = msgspec.json.decode(files[MANIFEST], type=_ManifestHead)
        if form.format > FORMAT:
            raise InvalidBundle(
                f"{name} has format {form.format} of pykubeproxy {form.version}, and this is"
                f" {pykubeproxy.__version__}, which reads up to {FORMAT}; upgrade pykubeproxy"
            )
        return msgspec.json.decode(files[MANIFEST], type=Manifest)
    except InvalidBundle:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidBundle(f"{name}: {MANIFEST} is damaged: {error}; {_COPY_AGAIN}") from None
