import socket

import pytest

from service.address import advertised, check_bindable, check_free, is_loopback, join, split
from twinpool.errors import ConfigError


@pytest.mark.parametrize(
    ("host", "port", "text"), [("10.0.0.1", 7, "10.0.0.1:7"), ("::1", 7, "[::1]:7"), ("a.b", 7, "a.b:7")]
)
def test_an_address_is_joined_and_split_again(host, port, text):
    assert join(host, port) == text
    assert split(text) == (host, port)


@pytest.mark.parametrize(
    "text", ["router", "router:", "router:x", ":7", "router:70000", "router:-1", "::1", "", "-5:7070"]
)
def test_what_is_no_host_and_port_is_refused(text):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        split(text)


@pytest.mark.parametrize("text", ["a:b:c", "http://router", "[router:1]:7070"])
def test_what_is_no_ipv6_address_has_no_colons(text):
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        split(text, default_port=7072)


@pytest.mark.parametrize(("text", "host"), [("router", "router"), ("2001:db8::1", "2001:db8::1"), ("[::1]", "::1")])
def test_a_bare_host_takes_the_default_port(text, host):
    assert split(text, default_port=7072) == (host, 7072)


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)]
)
def test_loopback_addresses_are_known(host, loopback):
    assert is_loopback(host) is loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "router"])
def test_other_addresses_are_open_to_the_network(host):
    assert not is_loopback(host)


def test_the_option_wins_over_what_is_bound():
    assert advertised("gpu7.example", "0.0.0.0", 7072) == "gpu7.example:7072"
    assert advertised("203.0.113.5:17072", "10.0.0.7", 7072) == "203.0.113.5:17072"


def test_a_bound_address_is_advertised_as_it_is():
    assert advertised("", "10.0.0.7", 7072) == "10.0.0.7:7072"


def test_every_interface_is_advertised_as_the_one_that_faces_the_peer():
    assert advertised("", "0.0.0.0", 7072, towards="127.0.0.1:7070") == "127.0.0.1:7072"


def test_every_interface_is_advertised_even_when_the_peer_has_no_name_yet():
    host, port = split(advertised("", "0.0.0.0", 7072, towards="no-such-host.invalid:7070"))
    assert port == 7072
    assert host not in ("0.0.0.0", "")


def test_a_port_in_use_is_named_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} is in use.*--kv-port or TWINPOOL_KV_PORT"):
            check_bindable("127.0.0.1", port, "kv_port")


def test_every_port_is_tried_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match="TWINPOOL_METRICS_PORT"):
            check_free("127.0.0.1", port=0, metrics_port=taken.getsockname()[1])
    check_free("127.0.0.1", port=0, metrics_port=-1)


def test_an_address_of_another_machine_cannot_be_bound():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        check_bindable("192.0.2.1", 0, "port")
