"""`deepspeed --module ds_seqpar calibrate -o machine.json`: measure the machine's rates and links on the ranks that are
to train, and write the file that the planner reads (`planner.machine`)."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from ..config.settings import SequenceParallelConfig
from ..errors import ConfigError
from ..files import write_text
from ..parallel import SequenceParallel
from ..planner.machine import machine_of
from ..runtime import groups
from ..runtime.agreement import assert_ranks_agree
from ..runtime.devices import host_memory
from .calibration import Calibration, zero_costs
from .launched import file_error, launched


def run(args: argparse.Namespace) -> None:
    """Run the command. Collective over the launched ranks.

    Raises:
        ConfigError: If no launcher started the ranks; on all ranks, if the first one cannot write the file.
    """
    with launched("calibrate") as is_first:
        error = file_error("--output", args.output) if is_first else None
        assert_ranks_agree(groups.control_world(), "files", None, error=error, call="calibrate")
        content = calibrate()
        if is_first:
            write_text(args.output, json.dumps(content, indent=1) + "\n", "--output")
            print(f"{table(content)}\n\nwrote {args.output}: python -m ds_seqpar plan --machine {args.output}")


def calibrate() -> dict[str, Any]:
    """Measure for less than a minute and return the content of a machine's file, the same on all ranks. Collective;
    torch.distributed must be initialized.

    Raises:
        ConfigError: For a single rank, and for nodes with unequal numbers of ranks.
    """
    config = SequenceParallelConfig(ulysses=1, layout="contiguous")
    with SequenceParallel(config) as sp:
        measured = Calibration(sp.comm, sp.control_world)
        with measured.bar:
            return _content(measured)


def _content(measured: Calibration) -> dict[str, Any]:
    inside = measured.link(measured.neighbour(1)) if measured.per_node > 1 else None
    between, uplink = measured.between() if measured.nodes > 1 else (None, None)
    any_link = inside or between
    if any_link is None:
        raise ConfigError("calibrate measures links, which needs two ranks; got 1, start it on more")
    orders, attention, gemm = measured.orders(), measured.attention(), measured.gemm()
    content = {
        "about": f"{measured.nodes} nodes of {measured.per_node} ranks, {measured.what()}",
        "per_node": measured.per_node,
        "inside": _wire(inside or any_link),
        "between": _wire(between or any_link),
        "uplink": uplink,
        "duplex": (between or any_link)["duplex"],
        "stolen": measured.stolen(any_link),
        "attention": attention,
        "gemm": gemm,
        "memory_rate": measured.memory_rate(),
        "elementwise_rate": measured.elementwise_rate(),
        "offload_rate": measured.offload_rate(),
        "host": {"instruction": measured.instruction(), "ahead": measured.kind != "cpu"},
        "host_memory": float(host_memory()),
        "host_rate": measured.host_rate(),
        "nvme_rate": None,
        "memory": measured.memory(),
        "reserve_fraction": 0.1,
        "zero": zero_costs(measured),
        "kernels": orders,
    }
    when = time.strftime("%Y-%m-%d")
    content["sources"] = {
        name: f"measured {when}, {measured.world} ranks at once" for name in content if name != "about"
    }
    content["sources"] |= {
        "per_node": "what the launcher says",
        "memory": "what the device has; of a CPU, a share of the host",
        "host_memory": "what the host has",
        "nvme_rate": "not measured: say what the drives have",
        "reserve_fraction": "supposed",
    }
    content["sources"]["host"] += "; ahead: what the kind of device does"
    for name, measured_link in (("inside", inside), ("between", between)):
        if measured_link is None:
            content["sources"][name] = "not measured: no two ranks are so far apart; taken for the other one"
    machine_of("calibrated", content)  # raises where a file must not have such a value
    return content


def _wire(link: dict[str, Any]) -> dict[str, float]:
    return {"latency": link["latency"], "rate": link["rate"]}


def table(fields: dict[str, Any]) -> str:
    """Return the figures as the command prints them."""
    lines = [fields["about"], ""]
    for name, text in (("inside", "two ranks of a node"), ("between", "ranks of two nodes")):
        link = fields[name]
        note = " (not measured: taken for the other)" * fields["sources"][name].startswith("not measured")
        rate, latency = link["rate"] / 1e9, link["latency"] * 1e6
        lines.append(f"{text:<20}{rate:10.3f} GB/s each way, latency {latency:.1f} us{note}")
    if fields["uplink"]:
        lines.append(f"{'a node to others':<20}{fields['uplink'] / 1e9:10.3f} GB/s each way, which its ranks share")
    for dtype, tables_by_direction in fields["attention"].items():
        best = {
            direction: max(rate for table in tables.values() for _, rate in table)
            for direction, tables in tables_by_direction.items()
        }
        lines.append(
            f"{dtype:<20}{fields['gemm'][dtype] / 1e9:10.1f} GFLOP/s in matrix products; in attention at most "
            f"{best['forward'] / 1e9:.1f} forward, {best['backward'] / 1e9:.1f} backward"
        )
    fresh = f"{fields['elementwise_rate'] / 1e9:.1f} into new tensors; {fields['memory'] / 2**30:.1f} GiB"
    lines.append(f"{'memory of a rank':<20}{fields['memory_rate'] / 1e9:10.1f} GB/s in place, {fresh}")
    costs = fields["zero"]
    lines.append(
        f"{'ZeRO-3':<20}{costs['gather']['rate'] / 1e9:10.3f} GB/s gathering, {costs['reduce']['rate'] / 1e9:.3f} "
        f"reducing; hooks of a module {costs['forward'] * 1e3:.2f} ms forward, {costs['backward'] * 1e3:.2f} backward"
    )
    lines.append(
        f"{'the host':<20}{fields['host']['instruction'] * 1e6:10.1f} us an instruction of ours; each end of a message "
        f"works {fields['stolen'] * 1e9:.3f} ns a byte"
    )
    return "\n".join(lines)
