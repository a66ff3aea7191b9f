"""The network interface of this machine that gloo uses."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import psutil

_VARIABLE = "GLOO_SOCKET_IFNAME"
_ELSEWHERE = "192.0.2.1"
"""No machine has this address (RFC 5737); a packet to it would take the default route."""


def gloo_interface(environ: Mapping[str, str]) -> dict[str, str]:
    """Return GLOO_SOCKET_IFNAME for a rank whose host name is an address of its own machine only.

    gloo announces the address of the host name to the other ranks. Debian writes `127.0.1.1 NAME`
    into /etc/hosts, so that they would connect to themselves. The interface is the one towards
    MASTER_ADDR; on the machine that has this address, if its name is local too, the default one.

    Args:
        environ: with the variables of the launcher.

    Returns:
        Nothing if the variable is set, all ranks are on this machine, the host name has another
        address, or the interface cannot be told.
    """
    if _VARIABLE in environ or environ["WORLD_SIZE"] == environ["LOCAL_WORLD_SIZE"]:
        return {}
    if not _is_loopback(_address(socket.gethostname())):
        return {}
    for other in (environ["MASTER_ADDR"], _ELSEWHERE):
        own = _address_towards(other)
        for name, addresses in psutil.net_if_addrs().items():
            if not _is_loopback(own) and own in [address.address for address in addresses]:
                return {_VARIABLE: name}
    return {}


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


def _address(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return "127.0.0.1"  # gloo falls back to it as well


def _address_towards(other: str) -> str:
    """Return this machine's address on the way to another one, to which nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
