"""A switch that is late: carries every frame from the port where it comes in to its destination's, DELAY seconds later.

    cluster_delay.py 0.002 n0 n1 ...

For kernels without netem. Runs in the switch's namespace (`cluster_net`), whose interface n7 leads to the node with the
link address 02:00:00:00:00:07. Frames keep what the kernel says of them in front (virtio's header): checksums that
nobody has made yet and segments that were not cut yet pass as they would through a bridge. Prints a line once it runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections import deque
from select import select

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
ALL, HEADER, LONGEST = 3, 10, 1 << 17
BUFFER = 1 << 28
PR_SET_PDEATHSIG = 1


def port(name: str) -> socket.socket:
    """A raw socket on an interface, with room for all that stands in its queue."""
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    found.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    found.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    found.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)
    found.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER)
    found.setblocking(False)
    found.bind((name, ALL))
    return found


def forward(delay: float, names: list[str]) -> None:
    ports = {int(name[1:]): port(name) for name in names}
    sources, late = list(ports.values()), deque[tuple[float, socket.socket, bytes]]()
    arriving = memoryview(bytearray(LONGEST))
    print("forwarding", flush=True)
    while True:
        now = time.monotonic()
        while late and late[0][0] <= now:
            _, target, frame = late.popleft()
            target.send(frame)
        readable, _, _ = select(sources, (), (), max(0.0, late[0][0] - time.monotonic()) if late else None)
        for source in readable:
            length, due = source.recv_into(arriving), time.monotonic() + delay
            frame = bytes(arriving[:length])
            node = int.from_bytes(frame[HEADER + 4 : HEADER + 6], "big")
            if node in ports and not frame[HEADER] & 1:  # neighbours are known: a broadcast is of no use to anybody
                late.append((due, ports[node], frame))


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # before ranks, or busy cores would be what is late
    forward(float(sys.argv[1]), sys.argv[2:])
