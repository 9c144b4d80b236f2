"""Free TCP ports of this machine."""

from __future__ import annotations

import random
import socket

# Below the range of outgoing connections: one of those could take the port before its server listens. Two ranges, so
# that a job and its engines do not take each other's.
JOBS = range(10_000, 20_000)
ENGINES = range(20_000, 32_000)


def free_port(among: range) -> int:
    """Return a port of this range on which nothing listens now."""
    while True:
        port = random.choice(among)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
