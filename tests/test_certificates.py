"""What a process is told about its certificates, before any peer has seen them."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from tests.certificates import Authority, Issued
from twinpool import certificates
from twinpool.certificates import Certificates
from twinpool.errors import ConfigError


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "ca")


@pytest.fixture(scope="module")
def issued(authority: Authority) -> Issued:
    return authority.issue("worker")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    return Authority(tmp_path_factory.mktemp("foreign") / "ca").issue("stranger")


def reason(cert: object, key: object, ca: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Certificates.load(str(cert), str(key), str(ca))
    return caught.value.message


def test_none_named_means_no_tls() -> None:
    assert Certificates.load("", "", "") is None


def test_what_is_loaded_speaks_tls_1_3_to_members_of_the_ca_only(issued: Issued) -> None:
    loaded = issued.load()
    for context in (loaded.server, loaded.client):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
    assert ssl.cert_time_to_seconds(loaded.valid_until) > 0
    assert "PRIVATE KEY" not in repr(loaded)


def test_a_part_of_the_three_is_an_error_that_names_the_missing_one(issued: Issued) -> None:
    assert reason(issued.cert, issued.key, "").startswith("--tls-ca is missing")
    assert reason("", issued.key, issued.ca).startswith("--tls-cert is missing")
    assert reason(issued.cert, "", issued.ca).startswith("--tls-key is missing")


def test_files_that_cannot_be_used_are_named_with_the_reason(
    issued: Issued, foreign: Issued, authority: Authority, tmp_path: Path
) -> None:
    nowhere = tmp_path / "nowhere.pem"
    assert f"{nowhere}: No such file" in reason(nowhere, issued.key, issued.ca)
    assert f"{nowhere}: No such file" in reason(issued.cert, nowhere, issued.ca)
    assert f"{nowhere}: No such file" in reason(issued.cert, issued.key, nowhere)
    assert f"{issued.key} holds no PEM certificate" in reason(issued.key, issued.key, issued.ca)
    assert f"{issued.cert} holds no private key" in reason(issued.cert, issued.cert, issued.ca)
    assert f"{issued.key} holds no PEM certificate" in reason(issued.cert, issued.key, issued.key)
    assert f"{foreign.key} does not fit {issued.cert}" in reason(issued.cert, foreign.key, issued.ca)


def test_a_certificate_that_peers_would_refuse_is_refused_at_start(
    issued: Issued, foreign: Issued, authority: Authority
) -> None:
    expired = authority.issue("expired", days=-1)
    assert f"{expired.cert}: certificate has expired" in reason(expired.cert, expired.key, expired.ca)
    assert f"{foreign.cert}: unable to get local issuer" in reason(foreign.cert, foreign.key, issued.ca)


def test_two_cas_in_one_file_take_certificates_of_both(issued: Issued, foreign: Issued, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(issued.ca.read_bytes() + foreign.ca.read_bytes())
    for each in (issued, foreign):
        assert Certificates.load(str(each.cert), str(each.key), str(both)) is not None


def test_a_router_that_dies_is_no_matter_of_certificates() -> None:
    assert certificates.hint("Stream removed (Socket closed)") == ""
    assert "TWINPOOL_TLS_CERT" in certificates.hint("UNAVAILABLE: ipv4:10.0.0.7:7070: Socket closed")
