"""The certificates of a test cluster: one authority and what it signs, made with openssl(1)."""

from __future__ import annotations

import subprocess
from pathlib import Path

DAYS = "2"


class Pki:
    """Keys and certificates in a directory, as PEM files named after their owner."""

    def __init__(self, directory: Path) -> None:
        """Makes the authority, and the key pair that signs service accounts' tokens."""
        self.directory = directory
        directory.mkdir(mode=0o700, parents=True)
        self.ca = directory / "ca.crt"
        self.sa_key = directory / "sa.key"
        self.sa_public = directory / "sa.pub"
        self._request("ca", "/CN=virtlun-test", "basicConstraints=critical,CA:TRUE")
        openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", self.sa_key)
        openssl("ec", "-in", self.sa_key, "-pubout", "-out", self.sa_public)

    def issue(self, name: str, subject: str, alternatives: str) -> tuple[Path, Path]:
        """Makes a certificate for both ends of TLS; returns it and its key.

        `alternatives` is a subjectAltName of x509v3_config(5).
        """
        return self._request(
            name,
            subject,
            f"subjectAltName={alternatives}",
            "extendedKeyUsage=serverAuth,clientAuth",
            signed=True,
        )

    def _request(
        self, name: str, subject: str, *extensions: str, signed: bool = False
    ) -> tuple[Path, Path]:
        certificate, key = self.directory / f"{name}.crt", self.directory / f"{name}.key"
        signer: list[str | Path] = (
            ["-CA", self.ca, "-CAkey", self.directory / "ca.key"] if signed else []
        )
        openssl(
            *("req", "-x509", "-nodes", "-days", DAYS, "-subj", subject),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-keyout", key, "-out", certificate),
            *(word for extension in extensions for word in ("-addext", extension)),
            *signer,
        )
        return certificate, key


def openssl(*words: str | Path) -> None:
    """Runs openssl; CalledProcessError with its words where it refuses."""
    subprocess.run(["openssl", *(str(word) for word in words)], check=True, capture_output=True)
