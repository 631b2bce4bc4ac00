"""A socket that listens at an address, and who reaches it."""

from __future__ import annotations

import ipaddress
import os
import socket


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address.

    >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; an address that cannot be had is a ValueError."""
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port must be from 0 to 65535, not {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise ValueError(f"--host {host} is not an address of this machine") from None
    server_socket = socket.socket(family, kind, protocol)
    try:
        if os.name != "nt":  # there it would let two servers share the port
            server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server_socket.bind(address)
        server_socket.listen(128)
    except OSError as error:
        server_socket.close()
        reason = error.strerror or str(error)
        raise ValueError(f"cannot listen at {host} port {port}: {reason}; --port 0 takes a free port") from None
    return server_socket


def address_of(host: str, port: int) -> str:
    """The address of a server, as a browser takes it.

    >>> address_of("::1", 8000)
    'http://[::1]:8000/'
    """
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
