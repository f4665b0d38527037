"""Certificates for TLS servers."""

import shlex
import subprocess
from pathlib import Path

_REQUEST = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=server"
)


def certificate(folder: Path) -> tuple[Path, Path]:
    """Return a self-signed certificate for 127.0.0.1 and its key."""
    made, key = folder / "certificate.pem", folder / "key.pem"
    write_certificate(made, key)
    return made, key


def write_certificate(file: Path, key: Path, address: str = "127.0.0.1") -> None:
    """Write a self-signed certificate for an IP address to `file`, and its key to `key`."""
    options = ("-addext", f"subjectAltName=IP:{address}", "-keyout", str(key), "-out", str(file))
    subprocess.run([*shlex.split(_REQUEST), *options], check=True, capture_output=True)
