"""The network interface of gloo's groups, in jobs that otherwise use NCCL.

Gloo uses the address that the host name resolves to. On many Linux systems that is 127.0.1.1, which other hosts cannot
reach. NCCL inspects interfaces instead, so its users see this problem only in groups for CPU tensors.
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
PORT = 9  # no packet is sent to it
ADDRESS_OF_INTERFACE = 0x8915  # Linux's SIOCGIFADDR


@contextlib.contextmanager
def gloo_meets_hosts() -> Iterator[None]:
    """Context manager in which gloo's groups are made on an interface that other hosts can reach.

    Gloo reads the interface from the environment for each new group. The variable is restored afterwards, so other
    groups and child processes are not affected. Collective over all ranks.

    Raises:
        CommunicationError: Ranks cannot connect.
    """
    world = compat.default_group()
    if world not in _found:  # on ranks for which the variable is set too, as others may lack it
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


_found: weakref.WeakKeyDictionary[dist.ProcessGroup, str | None] = weakref.WeakKeyDictionary()  # of all ranks' group


def _interface(store: dist.Store, ranks: int) -> str | None:
    """Return the interface that connects the hosts; None on a single host, or if it is unknown. Collective over all
    ranks.

    It is NCCL's interface, if that is set to one name. Otherwise it is the interface for packets to the first rank's
    host or, on that host, for packets to another host.
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
    """Return this host's address in packets to another host; "" if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((host, PORT))
        return str(probe.getsockname()[0])
    return ""


def _address_of(interface: str) -> str:
    from fcntl import ioctl  # here: Windows has none

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, contextlib.suppress(OSError):
        found = ioctl(asked.fileno(), ADDRESS_OF_INTERFACE, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(found[20:24])
    return ""
