"""Certificates for TLS servers."""

import subprocess
from pathlib import Path


def certificate(folder: Path) -> tuple[Path, Path]:
    """Return a self-signed certificate for 127.0.0.1 and its key."""
    made, key = folder / "certificate.pem", folder / "key.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=lab"
    )
    extra = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(made)]
    subprocess.run([*command.split(), *extra], check=True, capture_output=True)
    return made, key
