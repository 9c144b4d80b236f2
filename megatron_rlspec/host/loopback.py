"""Bind torch's TCPStore to the loopback address where that is its address: torch itself listens on every interface."""

from __future__ import annotations

import importlib
import ipaddress
import socket
from typing import Any


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`, a name or an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listener(host: str, port: int = 0) -> socket.socket:
    """Open a socket that listens on `host` only. Give its `detach()` to TCPStore as `master_listen_fd`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=4096)


def bind_stores() -> None:
    """Make every store that `init_process_group` opens under a loopback address listen on that address only."""
    from torch.distributed import TCPStore

    def store(
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        **options: Any,
    ) -> Any:
        if is_master and is_loopback(host_name):
            options["master_listen_fd"] = listener(host_name, port).detach()
        return TCPStore(host_name, port, world_size, is_master, **options)

    # By its full name: torch.distributed.rendezvous is a function of that module, too.
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    module.TCPStore = store
