import logging

import pytest

from service.security import ClusterKeyInterceptor, key_metadata, warn_if_open
from twinpool.errors import ConfigError

logger = logging.getLogger("test")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1"])
def test_an_open_door_to_the_network_is_announced(host, caplog):
    warn_if_open(logger, host, "")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "TWINPOOL_CLUSTER_KEY" in record.message
    assert record.host == host


@pytest.mark.parametrize(("host", "key"), [("127.0.0.1", ""), ("localhost", ""), ("0.0.0.0", "secret")])
def test_loopback_or_a_key_is_no_open_door(host, key, caplog):
    warn_if_open(logger, host, key)
    assert not caplog.records


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines", " padded", "padded ", "hush\t"])
def test_a_key_that_metadata_cannot_carry_is_refused_without_showing_it(key):
    for use in (lambda: key_metadata(key), lambda: ClusterKeyInterceptor(key, ["twinpool.v1.Decode"])):
        with pytest.raises(ConfigError, match="printable ASCII") as caught:
            use()
        assert key.strip() not in str(caught.value)


def test_an_empty_key_sends_nothing():
    assert key_metadata("") == ()
