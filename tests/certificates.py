"""Certificates for tests, made by the openssl command: a CA, and what it signs."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from twinpool.certificates import Certificates

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """Paths of one process' certificate, its key, and the CA that it trusts."""

    cert: Path
    key: Path
    ca: Path

    def load(self) -> Certificates:
        loaded = Certificates.load(str(self.cert), str(self.key), str(self.ca))
        assert loaded is not None
        return loaded

    @property
    def flags(self) -> list[str]:
        return ["--tls-cert", str(self.cert), "--tls-key", str(self.key), "--tls-ca", str(self.ca)]


class Authority:
    """A certificate authority whose files lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.cert, self._key = folder / "ca.pem", folder / "ca.key"
        _openssl(
            *("req", "-x509", *_CURVE, "-keyout", self._key, "-out", self.cert),
            *("-days", "3650", "-subj", "/CN=twinpool test CA"),
        )

    def issue(self, name: str, *, days: int = 30, names: str = "IP:127.0.0.1,DNS:localhost") -> Issued:
        """A certificate for `names`. days: how long it is valid from now on; negative: it has expired."""
        cert, key, request = (self._folder / f"{name}{ending}" for ending in (".pem", ".key", ".csr"))
        extensions = self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={names}\n")
        _openssl("req", *_CURVE, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self._key, "-CAcreateserial"),
            *("-days", days, "-extfile", extensions, "-out", cert),
        )
        return Issued(cert=cert, key=key, ca=self.cert)


def _openssl(*arguments: object) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
