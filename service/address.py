"""Addresses: host:port text, what a process binds, and what others reach it at.

join("::1", 7070)                                     # "[::1]:7070"
advertised("", "0.0.0.0", 7072, towards="router:7070")  # "172.18.0.3:7072", the address that faces the router
advertised("10.0.0.7:17072", "0.0.0.0", 7072)         # "10.0.0.7:17072", as told
"""

from __future__ import annotations

import errno
import ipaddress
import socket

from twinpool.errors import ConfigError


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str, default_port: int | None = None) -> tuple[str, int]:
    """Host and port of "host:port", "[v6]:port", or of "host" when there is a default port. Raises ConfigError."""
    host, separator, port = address.rpartition(":")
    if not separator or host.endswith(":") or (":" in host and not host.startswith("[")):
        host, port = address, ""  # no port: a bare name, or a bare IPv6 address
    host = host.removeprefix("[").removesuffix("]")
    if not port and default_port is not None:
        port = str(default_port)
    if not host or host.startswith("-") or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"address {address!r} is not HOST:PORT")
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError as error:
            raise ConfigError(f"address {address!r} is not HOST:PORT, nor [IPV6]:PORT") from error
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    return host in ("", "0.0.0.0", "::", "*")


def advertised(advertise: str, host: str, port: int, *, towards: str = "") -> str:
    """The host:port to tell others about a server bound to host:port.

    `advertise` (HOST or HOST:PORT) wins. A server bound to every interface is known by the address of the one that
    leads to `towards` (a peer's host:port); no packet is sent for this.
    """
    if advertise:
        return join(*split(advertise, default_port=port))
    return join(_own_address(towards) if is_wildcard(host) else host, port)


def _own_address(towards: str) -> str:
    for peer in (towards, "192.0.2.1:9"):  # TEST-NET-1, RFC 5737: stands for "somewhere beyond the default route"
        if not peer:
            continue
        try:
            family, kind, _, _, target = socket.getaddrinfo(*split(peer), type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return socket.gethostname()


def check_bindable(host: str, port: int, option: str) -> None:
    """Raises ConfigError when host:port cannot be listened on; port 0 always can where the host is ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            None if is_wildcard(host) else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise bind_error(error, host, port, option) from error


def check_free(host: str, **ports: int) -> None:
    """Raises ConfigError when one of `ports`, by the option that set it, is taken: before minutes of loading."""
    for option, port in ports.items():
        if port > 0:
            check_bindable(host, port, option)


def bind_error(error: OSError, host: str, port: int, option: str) -> ConfigError:
    """What to tell the operator when listening on host:port failed; `option` is the one that set the port."""
    flag, env = "--" + option.replace("_", "-"), "TWINPOOL_" + option.upper()
    where = join(host, port)
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"{where} is in use; stop what listens there, or choose another port with {flag} or {env}")
    if error.errno == errno.EACCES:
        return ConfigError(f"{where} needs privileges; choose a port above 1023 with {flag} or {env}")
    return ConfigError(f"cannot listen on {where}: {error.strerror or error}; check --host and {flag}")
