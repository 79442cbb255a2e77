"""A cluster of network namespaces: each node is a namespace, connected to a switch namespace by a rate-limited link.

A token bucket (`tc tbf`) at each end of a link limits a node's traffic separately in each direction. Ranks of one node
communicate over loopback, without a limit. Neighbors' addresses are configured in advance and IPv6 is disabled, so that
all counted traffic is TCP. The namespaces' names contain the creator's process id, so that `sweep` can find namespaces
of killed runs. Requires root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType

from benchmarks.tables import OptionError

PREFIX = "seqpar-cluster"
FOLDER = Path("/run/netns")
NAME = re.compile(PREFIX + r"-(\d+)-\w+")
PORT = "eth0"  # a node's interface
MTU = 9000
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
# no segment is lost, so avoid retransmission after idle times or long waits in a bucket's queue
SYSCTLS = {
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_early_retrans": "0",
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv6/conf/default/disable_ipv6": "1",
}


class NetworkError(RuntimeError):
    """Raised if the cluster cannot be created on this machine. The message names the requirement."""


def refusal() -> str | None:
    """Return a message about missing requirements, or None if a cluster can be created."""
    lacking = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if lacking:
        return f"a cluster in a box needs iproute2; {' and '.join(lacking)} cannot be found, install it"
    if os.geteuid():
        return f"a cluster in a box needs root, for network namespaces; got user id {os.geteuid()}, run it as root"
    return None


def rate_of(link: str) -> float:
    """Return the bytes per second of a rate in the notation of `tc`, such as "50mbit".

    Raises OptionError for other notations.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", link)
    if not match or not float(match[1]):
        raise OptionError(f"a link's rate must be a number with kbit, mbit or gbit; got {link!r}, write e.g. 50mbit")
    return float(match[1]) * UNITS[match[2]] / 8


class Network:
    """Context manager with `nodes` namespaces, each with an address. A single node is this machine, without a
    namespace.
    """

    def __init__(self, nodes: int, link: str) -> None:
        self.nodes, self.link = nodes, link
        self.switch = f"{PREFIX}-{os.getpid()}-switch"
        self.names = [f"{PREFIX}-{os.getpid()}-{node}" for node in range(nodes)] if nodes > 1 else []

    def __enter__(self) -> Network:
        if not self.names:
            return self
        if reason := refusal():
            raise NetworkError(reason)
        sweep()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Remove all namespaces that still exist."""
        for name in (*self.names, self.switch):
            remove(name)

    def _make(self) -> None:
        run("ip", "-batch", "-", lines=[f"netns add {name}" for name in (self.switch, *self.names)])
        ports = [f"n{node}" for node in range(self.nodes)]
        run("ip", "-n", self.switch, "-batch", "-", lines=[
            *(f"link add {port} mtu {MTU} type veth peer name {PORT} mtu {MTU} address {mac(node)} netns {name}"
              for node, (port, name) in enumerate(zip(ports, self.names, strict=True))),
            f"link add br0 mtu {MTU} type bridge",
            "link set br0 up",
            *(f"link set {port} master br0" for port in ports),
        ])  # fmt: skip
        for name in (self.switch, *self.names):
            writes = [f"echo {value} > /proc/sys/net/{key}" for key, value in SYSCTLS.items()]
            run("ip", "netns", "exec", name, "sh", "-ec", "\n".join(writes))
        for node, name in enumerate(self.names):
            others = [other for other in range(self.nodes) if other != node]
            run("ip", "-n", name, "-batch", "-", lines=[
                "link set lo up",
                f"address add {address(node)}/16 dev {PORT}",
                f"link set {PORT} up",
                f"route replace 10.77.0.0/16 dev {PORT} rto_min 5s",
                *(f"neighbor add {address(o)} lladdr {mac(o)} nud permanent dev {PORT}" for o in others),
            ])  # fmt: skip
        run("ip", "-n", self.switch, "-batch", "-", lines=[f"link set {port} up" for port in ports])
        self.limit(self.link)

    def limit(self, link: str) -> None:
        """Set the rate of all links."""
        # the burst is one frame or 1 ms, to limit what an idle link sends at once; the queue drops nothing
        bucket = f"tbf rate {link} burst {max(MTU + 1000, int(rate_of(link) * 0.001))} limit 256000000"
        for node, name in enumerate(self.names):
            for place, device in ((name, PORT), (self.switch, f"n{node}")):
                run("tc", "-n", place, "qdisc", "replace", "dev", device, "root", *bucket.split())


def address(node: int) -> str:
    """Return the IPv4 address of a node."""
    return f"10.77.{node // 200}.{node % 200 + 1}"


def mac(node: int) -> str:
    """Return the MAC address of a node, which ends with the node's number."""
    return f"02:00:00:00:{node >> 8:02x}:{node & 255:02x}"


def run(*words: str, lines: list[str] | None = None) -> str:
    """Run a tool with `lines` as input, and return its output. Raises NetworkError if the tool fails."""
    ran = subprocess.run(words, input="\n".join(lines or ()) + "\n", capture_output=True, text=True, check=False)
    if ran.returncode:
        raise NetworkError(f"`{' '.join(words)[:200]}` failed: {ran.stderr.strip()[:400]}")
    return ran.stdout


def sweep() -> list[str]:
    """Remove the namespaces of runs whose process has exited, kill the processes inside, and return the names."""
    found = [path.name for path in FOLDER.glob(f"{PREFIX}-*")] if FOLDER.is_dir() else []
    stale = [name for name in found if (match := NAME.fullmatch(name)) and not Path("/proc", match[1]).exists()]
    for name in stale:
        remove(name)
    return stale


def remove(name: str) -> None:
    """Kill the processes in a namespace, and remove the namespace with its interfaces."""
    if not FOLDER.joinpath(name).exists():
        return
    for _ in range(100):
        pids = run("ip", "netns", "pids", name).split()
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # already exited
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
    run("ip", "netns", "delete", name)


def counters() -> tuple[int, int]:
    """Return (bytes out, bytes in) of the interface of the calling thread's node, including headers."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, values = line.partition(":")
        if name.strip() == PORT:
            fields = values.split()
            return int(fields[8]), int(fields[0])
    raise NetworkError(f"a node's bytes are read from its interface {PORT}; this thread's namespace has none")
