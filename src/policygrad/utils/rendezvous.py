"""A key-value store of torch that is served on one address of this machine only.

A TCPStore binds to every interface, whatever address it is given (pytorch, torch/csrc/distributed/c10d/TCPStoreBackend.cpp), and
has no password. Given a socket that is bound already, it stays at the address that was named.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from policygrad.errors import ConfigError

LOCALHOST = "127.0.0.1"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # the variable that names gloo's network interface


def serve_store(host: str, timeout: timedelta) -> TCPStore:
    """Return a store that this process serves at a free port of `host`, an address or name of this machine."""
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listening = socket.create_server((str(address[0]), 0), family=family)
    port = listening.getsockname()[1]
    return TCPStore(
        host, port, None, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def connect_to_store(host: str, port: int, timeout: timedelta) -> TCPStore:
    """Return the store that another process serves."""
    return TCPStore(host, port, None, is_master=False, timeout=timeout, wait_for_workers=False)


def resolve(host: str) -> str:
    """Return the first address of a name, as this machine knows it; nothing if it does not."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def find_address(host: str, addresses: Sequence[str]) -> str:
    """Return the address at which one machine serves others, of those that each of them has found for its name.

    Args:
        host: The name.
        addresses: What it resolves to, that machine first; nothing where it does not. Its own may be loopback (Debian's 127.0.1.1).

    Raises:
        ConfigError: None knows the name.
    """
    known = [address for address in addresses if address]
    if not known:
        raise ConfigError(
            f"{host!r}, the first machine, has no address: name it by one of its network, --master-addr 10.0.0.1"
        )
    others = [address for address in known if not is_loopback_address(address)]
    return (others or known)[0]


def is_loopback_address(address: str) -> bool:
    """Return whether only this machine reaches the address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def resolves_to_loopback(host: str) -> bool:
    """Return whether only this machine reaches the address; a name that cannot be resolved is not loopback."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(map(is_loopback_address, addresses))


def use_loopback_for_gloo() -> None:
    """Let gloo connect processes of this machine over loopback, where it would use the address of the machine's name, or the
    interface that is named for runs on several machines."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]  # lo on Linux, lo0 on macOS
    if names:
        os.environ[GLOO_INTERFACE] = names[0]
