"""Show the packs of an optimizer step with samples of many lengths, and predict time and memory (docs/lengths.md)."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import NamedTuple

from ..analysis.draw import draw_packs
from ..base.errors import ConfigError, ranks_in_words
from ..core.compiler.schedules.plan import columns
from ..core.compiler.sharding.layout import divisors
from ..core.settings import SequenceParallelConfig
from ..data.placing import Pack
from ..planner import limits
from ..planner.footprint import Footprint, fits, footprint
from ..planner.lengths import Costs, Packed
from ..planner.machine import DEFAULT, Machine
from ..planner.request import Job, MemoryBudget
from .assumed import Answer
from .options import GIB, Inputs, lengths_in

HEAD = ["s a step", "tokens/s", "GiB a rank", "configuration"]
WIDTH = 64  # number of characters for the largest number of tokens on a rank
SHARED, WHOLE = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "-="


class Packing(NamedTuple):
    """Predictions for the packs of a step."""

    config: SequenceParallelConfig  # resolved, with the Ulysses size of the packs that need the most memory
    packed: Packed
    memory: Footprint  # memory of a pack of maximum size

    @classmethod
    def of(cls, inputs: Inputs, size: int, machine: Machine) -> Packing:
        """Return the predictions for groups of `size` ranks."""
        limits.check("ranks that share packs", size, limits.MAX_COMPARED_RANKS, "say --set size=8, or what is meant")
        config = dataclasses.replace(inputs.config, size=size)
        config = config.resolve(inputs.world, (inputs.model.heads, inputs.model.kv_heads), machine.per_node)
        costs = Costs.of(config, inputs.job, inputs.world, machine)
        packed = costs.packed(inputs.lengths, inputs.world // size, inputs.config.ulysses == "auto")
        job = dataclasses.replace(inputs.job, seq=inputs.per_rank * size, batch=1, window=None)
        configs = [dataclasses.replace(config, ulysses=ulysses) for ulysses in packed.ulysses]
        found = [(footprint(job.step(each, inputs.world, machine.gpus)), each) for each in configs]
        memory, largest = max(found, key=lambda one: one[0].peak.total)
        return cls(largest, packed, memory)


def config_of(inputs: Inputs) -> tuple[SequenceParallelConfig, list[str]]:
    """Return (the configuration for the pack that needs the most memory, lines about the step's packs)."""
    size = inputs.seq // inputs.per_rank
    packing = Packing.of(inputs, size, inputs.machine or Machine.load(DEFAULT))
    return packing.config, [f"a pack has at most {size} x {inputs.per_rank:,} tokens", *summary(packing.packed)]


def run_plan(inputs: Inputs, window: int | None, as_json: bool) -> None:
    """Print the time of a step with packs for each group size, next to the time with one sample per group at a time.

    Raises:
        ConfigError: No pack fits into memory, or a sample does not fit into a pack.
    """
    inputs = dataclasses.replace(inputs, job=dataclasses.replace(inputs.job, window=window))
    machine, least = inputs.machine, -(-max(inputs.lengths) // inputs.per_rank)
    assert machine is not None
    budget = MemoryBudget.of(machine, inputs.world, inputs.memory)
    sizes = [inputs.config.size] if inputs.config.size != "auto" else divisors(inputs.world)
    ulysses = 1 if inputs.config.ulysses == "auto" else inputs.config.ulysses
    sizes = [n for n in sizes if max(2, least) <= n <= limits.MAX_COMPARED_RANKS and n % ulysses == 0]
    found = [Packing.of(inputs, size, machine) for size in sizes]
    fitting = sorted((x for x in found if fits(x.memory, budget)), key=lambda x: x.packed.seconds)
    if not fitting:
        needs = [f"{x.config.size} ranks need {x.memory.peak.total / GIB:.1f} GiB each" for x in found]
        raise ConfigError(
            f"packs must fit {budget.limit / GIB:.1f} GiB a rank, and the longest sample, {max(inputs.lengths)} "
            f"tokens, a pack; got {', '.join(needs) or f'{inputs.world} ranks with {inputs.per_rank} tokens each'}, "
            f"{'lower' if needs else 'raise'} tokens_per_rank, or take more ranks"
        )
    answer, total = Answer(inputs, fitting[0].config, len(inputs.lengths)), sum(inputs.lengths)
    ranked, rows = list[dict[str, object]](), [HEAD]
    for config, packed, memory in fitting:
        one = packed.costs.seconds_one_a_group(inputs.lengths, inputs.world // config.size)
        ranked.append({
            "section": answer.section(config), "seconds_a_step": packed.seconds, "one_sample_a_group": one,
            "memory": memory.peak.total, "work_of_ranks": packed.of_ranks, "work_of_groups": packed.of_groups,
            "cut": packed.cut, "ulysses": {str(size): number for size, number in packed.ulysses.items()},
        })  # fmt: skip
        slower = f"one sample a group of {config.size}: {one / packed.seconds:.2f} times as long"
        for seconds, gib, text in (
            (packed.seconds, f"{memory.peak.total / GIB:.1f}", f"packs of {config.size} x {inputs.per_rank:,} tokens"),
            (one, "", slower),
        ):
            rows.append([f"{seconds:.3g}", f"{total / seconds:,.0f}", gib, text])
    if as_json:
        print(json.dumps({"ranked": ranked, **answer.for_json()}))
        return
    print("\n".join([
        f"{len(inputs.lengths)} samples a step, {total:,} tokens, the longest {max(inputs.lengths):,}, on "
        f"{inputs.world} ranks of {machine.name} ({machine.about})",
        *answer.lines(), "", *columns(rows), "", f"the first: {'; '.join(summary(fitting[0].packed))}", "",
        *answer.json_lines(),
    ]))  # fmt: skip


def summary(packed: Packed) -> list[str]:
    """Return lines about the packs of a step."""
    documents = sum(len(pack.documents) for packs in packed.packs for pack in packs)
    sizes = [f"{number} with Ulysses {ulysses}" for ulysses, number in packed.ulysses.items()]
    return [
        f"micro-batches of each group: {max(map(len, packed.packs))}; packs: {', '.join(sizes)}",
        f"work, most over mean: {packed.of_ranks:.3f} of ranks, {packed.of_groups:.3f} of groups",
        f"documents on several CP ranks: {packed.cut} of {documents} ({packed.cut / documents:.1%})",
    ]


def show(args: argparse.Namespace, config: SequenceParallelConfig) -> None:
    """Draw the packs of a step and their assignment to ranks. `config` contains the command's settings."""
    from ..models import numbers_of  # imports torch, which takes seconds

    lengths, machine = lengths_in("--lengths", args.lengths), Machine.load(args.machine or DEFAULT)
    if args.model is None or config.tokens_per_rank == "auto":
        raise ConfigError("show --lengths needs --model PLACE, by whose sizes samples cost, and --tokens-per-rank N")
    world, model = args.ranks or args.size, numbers_of(args.model)
    limits.check("--ranks", world, limits.MAX_SHOWN_RANKS)
    limits.check("the samples of a step", len(lengths), limits.MAX_DOCUMENTS)
    resolved = config.resolve(world, (model.heads, model.kv_heads), machine.per_node)
    costs = Costs.of(resolved, Job(model=model, checkpointing=True), world, machine)
    packed = costs.packed(lengths, world // args.size, config.ulysses == "auto")
    print(
        "\n".join([*_lines(packed), "(letters: documents on several CP ranks; - and =: whole ones)", *summary(packed)])
    )
    if args.png is not None:
        draw_packs(packed.packs, args.png)
        print(f"wrote {args.png}")


def _lines(packed: Packed) -> Iterator[str]:
    widest = max(sum(part.tokens for part in parts) for packs in packed.packs for x in packs for parts in x.parts)
    for group, packs in enumerate(packed.packs):
        for number, pack in enumerate(packs):
            cut, size, works, rows = len(pack.cut), pack.ulysses, packed.costs.works(pack), []
            yield (
                f"group {group}, micro-batch {number}: documents: {len(pack.documents)}, of them on several CP ranks: "
                f"{cut}; Ulysses {size}"
            )
            mean = sum(works) / len(works) or 1.0
            for rank, (parts, work) in enumerate(zip(pack.parts, works, strict=True)):
                held = sum(part.tokens for part in parts)
                name = ranks_in_words(range(rank * size, (rank + 1) * size))
                drawn = f"{_drawn(pack, rank, widest):{WIDTH}}"
                rows.append(["", name, drawn, f"{held:,} tokens", f"work {work / mean:.2f}"])
            yield from columns(rows)
            yield ""


def _drawn(pack: Pack, rank: int, widest: int) -> str:
    """Draw a rank's tokens as characters. Each shared document is a letter, and whole documents alternate."""
    text, held = "", 0
    for number, part in enumerate(pack.parts[rank]):
        held += part.tokens
        letters = SHARED if part.document in pack.cut else WHOLE
        index = part.document if part.document in pack.cut else number
        text += letters[index % len(letters)] * (round(held * WIDTH / widest) - len(text))
    return text
