"""Free ports of this machine, for servers that must know their port before they start."""

from __future__ import annotations

import random
import socket

# Below the range from which Linux takes ports for "any port": there, the next socket of any process may take a port
# that was free a moment ago. Above the ports that Ray gives its worker processes (10,002 to 19,999).
PORTS = range(20_000, 32_768)
_CLUSTER_BUS = 10_000


def free_port() -> int:
    return _free(PORTS, (0,))


def free_redis_port() -> int:
    """A free port whose cluster bus, 10,000 above it, is free as well."""
    return _free(range(PORTS.start, PORTS.stop - _CLUSTER_BUS), (0, _CLUSTER_BUS))


def _free(ports: range, offsets: tuple[int, ...]) -> int:
    while True:
        port = random.choice(ports)
        if all(_can_bind(port + offset) for offset in offsets):
            return port


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
