"""What a process proves itself with over mutual TLS: its certificate, the key to it, and the CA that all peers share.

The CA is the trust: whoever holds a certificate that it signed belongs to the deployment. `load` reads the three files
once and tries them out in a handshake with itself, so that whatever a peer would refuse is an error at start.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from twinpool.errors import ConfigError

_HINTS = (  # what gRPC's core, with BoringSSL, says of a handshake
    ("Hostname Verification Check failed", "its certificate does not name the host that it was reached at"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not of the CA given here, or has expired"),
    ("WRONG_VERSION_NUMBER", "TLS is configured here, and not there"),
    ("Tls handshake failed", "one of both refused the other's certificate"),
    (
        ": Socket closed",
        "where it has TLS, show it a certificate of its CA (TWINPOOL_TLS_CERT, _KEY, _CA)",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """Made by `load`. The contexts speak TLS 1.3 only and demand a certificate of the CA from the other side."""

    cert_pem: bytes  # with intermediate certificates behind it, if any
    key_pem: bytes = field(repr=False)
    ca_pem: bytes
    valid_until: str  # "Dec  2 14:00:00 2027 GMT"
    server: ssl.SSLContext
    client: ssl.SSLContext

    @classmethod
    def load(cls, cert: str, key: str, ca: str) -> Certificates | None:
        """From three PEM files; None when none is named. Raises ConfigError naming the file and what is wrong."""
        named = {"tls_cert": cert, "tls_key": key, "tls_ca": ca}
        missing = [name for name, path in named.items() if not path]
        if len(missing) == len(named):
            return None
        if missing:
            given = next(name for name, path in named.items() if path)
            raise ConfigError(
                f"{_flag(missing[0])} is missing: TLS needs --tls-cert, --tls-key and --tls-ca, "
                f"and {_flag(given)} is {named[given]!r}",
                field=missing[0],
            )
        pem = {name: _read(name, path) for name, path in named.items()}
        contexts = []
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            _trust(context, "tls_ca", ca, pem["tls_ca"])
            _present(context, cert, key, pem["tls_cert"])
            contexts.append(context)
        server, client = contexts
        server.num_tickets = 0  # links last; nobody resumes one
        return cls(
            cert_pem=pem["tls_cert"],
            key_pem=pem["tls_key"],
            ca_pem=pem["tls_ca"],
            valid_until=_try_out(server, client, cert, ca),
            server=server,
            client=client,
        )


def hint(reason: str) -> str:
    """What to look at when gRPC gives this `reason` for a connection that failed: ": ..." or "" where it is not TLS."""
    for words, advice in _HINTS:
        if words in reason:
            return f": {advice}"
    return ""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}; check {_flag(name)}", field=name) from exc


def _trust(context: ssl.SSLContext, name: str, path: str, pem: bytes) -> None:
    try:
        context.load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError) as exc:
        raise ConfigError(f"{path} holds no PEM certificate: {exc}; check {_flag(name)}", field=name) from exc


def _present(context: ssl.SSLContext, cert: str, key: str, cert_pem: bytes) -> None:
    _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), "tls_cert", cert, cert_pem)  # else it would be told of the key
    try:
        context.load_cert_chain(cert, key, password=lambda: b"")  # without it OpenSSL would ask the terminal
    except ssl.SSLError as exc:
        if exc.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"{key} does not fit {cert}: it is the key to another certificate", field="tls_key"
            ) from exc
        raise ConfigError(f"{key} holds no private key in PEM without a passphrase: {exc}", field="tls_key") from exc
    except OSError as exc:
        raise ConfigError(f"{key}: {exc.strerror}; check --tls-key", field="tls_key") from exc


def _try_out(server: ssl.SSLContext, client: ssl.SSLContext, cert: str, ca: str) -> str:
    """A handshake of this process with itself, in memory. Returns until when the certificate is valid."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    try:
        for side in sides * 2:
            _go_on(side.do_handshake)
    except ssl.SSLCertVerificationError as exc:
        raise ConfigError(
            f"{cert}: {exc.verify_message} (as peers with {ca} see it); check --tls-cert and --tls-ca",
            field="tls_cert",
        ) from exc
    except ssl.SSLError as exc:
        raise ConfigError(f"{cert} cannot be used for TLS 1.3: {exc}", field="tls_cert") from exc
    shown = sides[0].getpeercert() or {}
    return str(shown.get("notAfter", ""))


def _go_on(handshake: Callable[[], None]) -> None:
    with contextlib.suppress(ssl.SSLWantReadError):  # it is the other side's turn
        handshake()
