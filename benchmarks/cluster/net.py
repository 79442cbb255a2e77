"""A cluster of network namespaces: a node is one, joined to a switch (one more) by a link of a given rate each way.

Both ends of every link have a token bucket (`tc tbf`), so a node's traffic is limited out and in, each by itself. Ranks
of one node talk by its loopback, without a limit. Neighbors' addresses are written down beforehand and nothing speaks
IPv6: all that is counted is TCP. The names of namespaces have the maker's process id, so `sweep` finds what a killed
run left. Needs root and iproute2.
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

PREFIX = "seqpar-cluster"
FOLDER = Path("/run/netns")
NAME = re.compile(PREFIX + r"-(\d+)-\w+")
PORT = "eth0"  # a node's interface
MTU = 9000
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
# no segment is lost, so none need be sent twice: not after an idle time, nor because it stood long in a bucket's queue
SYSCTLS = {
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_early_retrans": "0",
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv6/conf/default/disable_ipv6": "1",
}


class NetworkError(RuntimeError):
    """The cluster cannot be set up here; the message says what is needed."""


def refusal() -> str | None:
    """What this machine lacks, in a sentence; None where a cluster can be made."""
    lacking = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if lacking:
        return f"a cluster in a box needs iproute2; {' and '.join(lacking)} cannot be found, install it"
    if os.geteuid():
        return f"a cluster in a box needs root, for network namespaces; got user id {os.geteuid()}, run it as root"
    return None


def rate_of(link: str) -> float:
    """Bytes a second of a rate as `tc` spells it in bits ("50mbit"). Raises ValueError for another spelling."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", link)
    if not match or not float(match[1]):
        raise ValueError(f"a link's rate must be a number with kbit, mbit or gbit; got {link!r}, write e.g. 50mbit")
    return float(match[1]) * UNITS[match[2]] / 8


class Network:
    """`nodes` namespaces with an address each, from `with` to its end; none of one node, which is this machine."""

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
        """Takes everything down; what is down already is passed over."""
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
        """Gives every link this rate from now on."""
        # a bucket of a frame or 1 ms is all that an idle link gives for nothing; its queue loses nothing
        bucket = f"tbf rate {link} burst {max(MTU + 1000, int(rate_of(link) * 0.001))} limit 256000000"
        for node, name in enumerate(self.names):
            for place, device in ((name, PORT), (self.switch, f"n{node}")):
                run("tc", "-n", place, "qdisc", "replace", "dev", device, "root", *bucket.split())


def address(node: int) -> str:
    """The IPv4 address of a node."""
    return f"10.77.{node // 200}.{node % 200 + 1}"


def mac(node: int) -> str:
    """The link address of a node, whose last two bytes are its number."""
    return f"02:00:00:00:{node >> 8:02x}:{node & 255:02x}"


def run(*words: str, lines: list[str] | None = None) -> str:
    """Runs a tool to its end, `lines` its input; returns what it prints. Raises NetworkError where it fails."""
    ran = subprocess.run(words, input="\n".join(lines or ()) + "\n", capture_output=True, text=True, check=False)
    if ran.returncode:
        raise NetworkError(f"`{' '.join(words)[:200]}` failed: {ran.stderr.strip()[:400]}")
    return ran.stdout


def sweep() -> list[str]:
    """Removes the namespaces of runs whose process is gone, with the processes in them; returns their names."""
    found = [path.name for path in FOLDER.glob(f"{PREFIX}-*")] if FOLDER.is_dir() else []
    stale = [name for name in found if (match := NAME.fullmatch(name)) and not Path("/proc", match[1]).exists()]
    for name in stale:
        remove(name)
    return stale


def remove(name: str) -> None:
    """Ends the processes of a namespace, and removes it with its interfaces."""
    if not FOLDER.joinpath(name).exists():
        return
    for _ in range(100):
        pids = run("ip", "netns", "pids", name).split()
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
    run("ip", "netns", "delete", name)


def counters() -> tuple[int, int]:
    """(bytes out, bytes in) that the interface of the calling thread's node has carried, headers included."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, values = line.partition(":")
        if name.strip() == PORT:
            fields = values.split()
            return int(fields[8]), int(fields[0])
    raise NetworkError(f"a node's bytes are read from its interface {PORT}; this thread's namespace has none")
