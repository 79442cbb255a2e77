"""Check whether a run can resume from DeepSpeed's files, and convert them for another ZeRO stage or number of ranks.

DeepSpeed's universal format contains complete parameters and Adam states, and can be loaded into any partition. This
module restores the state that the universal format omits: buffers, frozen parameters and, if either run uses ZeRO-3,
the step and the parameter group settings.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...base.errors import ranks_in_words
from ...guards.agreement import all_gather_objects
from ..config import DeepSpeedJson, Zero
from .atomic import is_whole

UNIVERSAL = "universal"  # name of the folder for the converted copy, inside the checkpoint's folder
MODEL = "mp_rank_00_model_states.pt"  # suffix of files with weights
ADAM = ("exp_avg", "exp_avg_sq")  # the optimizer states that DeepSpeed converts
GLOBAL = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadingRun:
    """The run that reads a checkpoint."""

    rank: int
    ranks: int
    stage: int  # ZeRO stage
    dtype: str
    universal: bool = False  # whether DeepSpeed reads the universal format, which works for any run


@dataclasses.dataclass(kw_only=True)
class EngineReport:
    """One rank's findings about an engine's files. The text fields are "" if there is no problem."""

    name: str = ""  # the name of the engine's folder
    fault: str = ""  # a description of missing or damaged files
    mismatch: str = ""  # the reason why the checkpoint does not fit this run
    ranks: int = 0  # number of ranks that wrote the checkpoint
    converts: bool = False  # whether a conversion is required


def inspect_engine(folder: Path, run: LoadingRun, further: Iterable[Path] = ()) -> EngineReport:
    """Return a report on the files that this rank would read from an engine's checkpoint.

    Args:
        folder: The folder of the checkpoint's tag.
        run: The run that reads the checkpoint.
        further: Other files and folders that must exist.
    """
    report = EngineReport(name=folder.name)
    faults = itertools.chain(map(fault_of, further), _faults(folder, run, report))
    report.fault = next(filter(None, faults), "")
    return report


def report_of_all(group: dist.ProcessGroup | None, inspect: Callable[[], EngineReport]) -> EngineReport:
    """Combine all ranks' reports on a checkpoint, including which ranks found a fault.

    The call is collective across the group.

    Args:
        group: The group of all ranks for CPU tensors.
        inspect: A function that returns this rank's report. Any exception counts as a fault, since reading a damaged
            file can raise any exception.
    """
    try:
        report = inspect()
    except Exception as reason:
        report = EngineReport(fault=f"reading it failed ({type(reason).__name__})")
    reports = [x for _, x in all_gather_objects(group, ("the checkpoint", report))]
    by_fault = {x.fault: [rank for rank, other in enumerate(reports) if other.fault == x.fault] for x in reports}
    fault = ", ".join(f"{fault} ({ranks_in_words(ranks)})" for fault, ranks in by_fault.items() if fault)
    if len({x.name for x in reports if not x.fault}) > 1:
        fault = "ranks see different steps in it"
    mismatch = next((x.mismatch for x in reports if x.mismatch), "")
    return dataclasses.replace(reports[0], fault=fault, mismatch=mismatch)


def _faults(folder: Path, run: LoadingRun, report: EngineReport) -> Iterator[str]:
    """Check files one by one, and yield a description of each missing or damaged file, or "" for an intact file.

    The function also fills in the rest of the report. The caller stops at the first fault, so later checks may rely on
    earlier files.
    """
    if run.universal:
        report.ranks = run.ranks
        return
    models = sorted(folder.glob(f"*{MODEL}"))
    if not models:
        yield f"{folder.name} has no model_states.pt"
    local_file = f"zero_pp_rank_{run.rank}_"
    model_states = next((path for path in models if path.name.startswith(local_file)), models[0])
    yield fault_of(model_states)
    # like DeepSpeed, but mmap leaves tensors on disk
    content = torch.load(model_states, map_location="cpu", weights_only=False, mmap=True)
    report.ranks = content.get("dp_world_size", run.ranks)
    settings = DeepSpeedJson.read(content.get("ds_config", {})).known
    stage, dtype = settings.zero_optimization.stage, settings.dtype
    if bool(stage) != bool(run.stage):
        report.mismatch = (
            f"the checkpoint was written under ZeRO stage {stage}, and this run has {run.stage}: set that stage, since "
            "DeepSpeed converts between 1, 2 and 3 alone"
        )
    elif dtype != run.dtype:
        report.mismatch = f"the checkpoint was written in {dtype}, and this run has {run.dtype}: set it alike"
    report.converts = (stage == 3) != (run.stage == 3) or (run.stage > 0 and report.ranks != run.ranks)
    if report.mismatch or (report.converts and run.rank):
        return
    for rank in range(report.ranks) if report.converts else [run.rank]:
        if stage == 3:
            yield fault_of(folder / f"zero_pp_rank_{rank}_{MODEL}")
        if stage:
            half = "bf16_" if dtype == "bfloat16" else ""
            optimizer = folder / f"{half}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            yield fault_of(optimizer)
            if report.converts and not rank:
                report.mismatch = _unconvertible(optimizer, settings.zero_optimization)


def _unconvertible(path: Path, zero: Zero) -> str:
    """Return the reason why DeepSpeed cannot convert a checkpoint, or "" if DeepSpeed can."""
    same = "start as many ranks, under the same ZeRO stage, as the run that wrote it"
    if "nvme" in (zero.offload_optimizer.device, zero.offload_param.device):
        return f"DeepSpeed converts no checkpoint of what is offloaded to NVMe: {same}"
    optimizer = torch.load(path, map_location="cpu", weights_only=False, mmap=True)["optimizer_state_dict"]
    states = optimizer["optimizer_state_dict" if zero.stage == 3 else "base_optimizer_state"]["state"]
    found: Mapping[str, Any] = next(iter(states.values() if isinstance(states, dict) else states), {})
    if {*ADAM, "step"} != found.keys():  # for example, amsgrad adds a state tensor
        return f"DeepSpeed converts Adam's states alone, and this optimizer has {', '.join(found) or 'none'}: {same}"
    return ""


def fault_of(path: Path) -> str:
    return "" if is_whole(path) or path.is_dir() else f"{path.name} is {'damaged' if path.exists() else 'missing'}"


def convert(source: Path, target: Path) -> None:
    """Write an engine's checkpoint in DeepSpeed's universal format, which can be loaded with ZeRO stage 1 or higher.

    Args:
        source: The folder of the checkpoint's tag.
        target: The folder to create.
    """
    import deepspeed
    from deepspeed.checkpoint.ds_to_universal import main

    given = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    with tempfile.TemporaryDirectory() as place:  # a path without glob characters
        for name, folder in (("from", source), ("to", target)):
            Path(place, name).symlink_to(folder.absolute(), target_is_directory=True)
        folders = {"input_folder": f"{place}/from", "output_folder": f"{place}/to"}
        main(argparse.Namespace(**folders, **given, inject_missing_state=True))
    zero, trained = target / "zero", [path.parent for path in target.glob(f"zero/*/{ADAM[0]}.pt")]
    state = torch.load(zero / "optimizer_state.pt", map_location="cpu", weights_only=False)
    nested = state.get("optimizer_state_dict")  # ZeRO-3 only, which saves no step per parameter
    step = nested["state"][0]["step"] if nested else torch.load(trained[0] / "step.pt", weights_only=False)
    groups = state["param_groups"]
    for folder in trained if nested else ():
        torch.save(step, folder / "step.pt")
        for path in (folder / f"{name}.pt" for name in ("fp32", *ADAM)):
            torch.save({"param": torch.load(path, weights_only=False)}, path)
    by_stage = {"param_groups": groups, "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups}}
    known = {name: state[name] for name in GLOBAL if name in state}
    torch.save({**known, **by_stage, "ds_version": deepspeed.__version__}, zero / "optimizer_state.pt")
    # the remaining files, under the name that each stage expects
    models = [target / f"zero_pp_rank_{rank}_{MODEL}" for rank in range(len([*target.glob(f"zero*{MODEL}")]))]
    models = models if nested else [target / MODEL]
    ranks = [torch.load(model, map_location="cpu", weights_only=False, mmap=True) for model in models]
    content, names = ranks[0], {folder.name for folder in trained}
    content["module"] = {name: x.clone() for name, x in content["module"].items() if name not in names}
    for name, shape in (content["frozen_param_shapes"] or {}).items() if nested else ():
        fragments = torch.cat([rank["frozen_param_fragments"][name] for rank in ranks])
        content["module"][name] = fragments[: shape.numel()].view(shape)
    for model in models:
        model.unlink()
    torch.save(content, target / MODEL)
    shutil.copyfile(target / MODEL, target / f"zero_pp_rank_0_{MODEL}")


def restore_missing_state(engine: Any, folder: Path) -> None:
    """Restore state that DeepSpeed omits when an engine loads a converted checkpoint.

    Under ZeRO-3, the call is collective.

    Args:
        engine: DeepSpeed's engine.
        folder: The converted checkpoint.
    """
    import deepspeed

    state = torch.load(folder / "zero" / "optimizer_state.pt", map_location="cpu", weights_only=False)
    for group, saved in zip(engine.optimizer.param_groups, state["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
    for states in engine.optimizer.optimizer.state.values():  # replace the shared step with one copy per state
        states["step"] = copy.deepcopy(states["step"])
    content = torch.load(folder / MODEL, map_location="cpu", weights_only=False)["module"]
    targets = {name: x for name, x in engine.module.named_parameters() if not x.requires_grad}
    with deepspeed.zero.GatheredParameters(list(targets.values()), modifier_rank=0), torch.no_grad():
        targets |= dict(engine.module.named_buffers())
        for name in targets.keys() & content.keys():
            targets[name].copy_(content[name])
