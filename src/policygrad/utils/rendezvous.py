"""A key-value store of torch that is served on one address of this machine only.

A TCPStore binds to every interface, whatever address it is given (pytorch, torch/csrc/distributed/c10d/TCPStoreBackend.cpp), and
has no password. Given a socket that is bound already, it stays at the address that was named.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

LOCALHOST = "127.0.0.1"
ANY_ADDRESS = "0.0.0.0"
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


def resolves_to_loopback(host: str) -> bool:
    """Return whether only this machine reaches the address; a name that cannot be resolved is not loopback."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def use_loopback_for_gloo() -> None:
    """Let gloo connect processes of this machine over loopback, where it would use the address of the machine's name."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]  # lo on Linux, lo0 on macOS
    if names:
        os.environ.setdefault(GLOO_INTERFACE, names[0])
