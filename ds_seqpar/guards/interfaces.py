"""Choose the network interface for gloo groups in jobs that otherwise use NCCL.

Gloo uses the address to which the host name resolves. On many Linux systems, the host name resolves to 127.0.1.1, which
other hosts cannot reach. NCCL inspects interfaces instead, so NCCL users see this problem only in groups for CPU
tensors.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import weakref
from collections.abc import Iterator

import torch.distributed as dist

from ..base import compat
from ..base.errors import CommunicationError
from ..base.hosts import host_name

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"  # environment variables
PORT = 9  # no packet is sent to this port
ADDRESS_OF_INTERFACE = 0x8915  # Linux's SIOCGIFADDR


@contextlib.contextmanager
def gloo_meets_hosts() -> Iterator[None]:
    """Return a context manager in which new gloo groups use an interface that other hosts can reach.

    For each new group, gloo reads the interface from an environment variable. The variable is restored afterwards, so
    that other groups and child processes are not affected. All ranks must enter the context.

    Raises:
        CommunicationError: Ranks cannot connect.
    """
    world = compat.default_group()
    if world not in _found:  # even if the variable is set on this rank, since other ranks may lack it
        _found[world] = _interface(compat.default_store(), world.size())
    interface = None if GLOO in os.environ else _found[world]
    if interface is not None:
        os.environ[GLOO] = interface
    try:
        yield
    except RuntimeError as error:
        taken = os.environ.get(GLOO) or "the one that the host's name resolves to"
        raise CommunicationError(
            f"ranks must reach one another by gloo, over TCP; on interface {taken} they do not, set {GLOO} to one that "
            "joins the hosts, such as eth0, on every rank"
        ) from error
    finally:
        if interface is not None:
            del os.environ[GLOO]


# interface, by world group
_found: weakref.WeakKeyDictionary[dist.ProcessGroup, str | None] = weakref.WeakKeyDictionary()


def _interface(store: dist.Store, ranks: int) -> str | None:
    """Return the interface that connects the hosts, or None for a single host or an unknown interface.

    An interface that is named in NCCL's setting is preferred. If the setting names no single interface, the interface
    is determined by the route to the first rank's host. On the first rank's host, the interface is determined by the
    route to another host. All ranks must call this function.
    """
    store, is_first = dist.PrefixStore("ds_seqpar/hosts", store), dist.get_rank() == 0
    if is_first:
        store.set("first", host_name())
    is_elsewhere = host_name() != store.get("first").decode()
    own = _address_towards(os.environ.get("MASTER_ADDR", ""))
    if is_elsewhere:
        store.compare_set("another", "", own or "?")
    if store.add("known", 1) == ranks:
        store.set("all known", "")
    store.wait(["all known"])
    if not store.check(["another"]):
        return None
    names = [name for _, name in socket.if_nameindex()]
    if (name := os.environ.get(NCCL, "").removeprefix("=")) in names:
        return name
    address = own if is_elsewhere else _address_towards(store.get("another").decode())
    return next((name for name in names if address and _address_of(name) == address), None)


def _address_towards(host: str) -> str:
    """Return this host's source address for packets to another host, or "" if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((host, PORT))
        return str(probe.getsockname()[0])
    return ""


def _address_of(interface: str) -> str:
    from fcntl import ioctl  # imported here because Windows has no fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, contextlib.suppress(OSError):
        found = ioctl(asked.fileno(), ADDRESS_OF_INTERFACE, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(found[20:24])
    return ""
