"""What other packages do not document is used in the compat modules alone, and the installed releases have it."""

import ast
import functools
import importlib.metadata
import importlib.util
import pkgutil
import re
import types
from pathlib import Path

import pytest
from accelerate import utils
from torch import nn

from ds_seqpar.base.compat import SEEN, attribute, private
from ds_seqpar.base.errors import ConfigError
from hf_integration.compat import (
    EXTENDED,
    EXTENDED_OF_ROLLOUTS,
    EXTENDED_OF_TRL,
    EXTENDED_OF_VLLM,
    check_calls,
    check_rollouts,
    check_trainer,
)
from hf_integration.rebinding import rebound
from tests.unit.test_imports import MODULES, ROOT, imported, tree_of

COMPAT = ("ds_seqpar.base.compat", "hf_integration.compat")
# internals without an underscore
INTERNAL = {
    *("distributed_c10d", "pg_map", "wrapped_pg", "TensorBase", "DisableTorchFunctionSubclass", "build_shm_op"),
    *("ds_id", "ds_shape", "ds_numel", "tput_timer", "global_samples", "get_param_coordinator", "jit_manager"),
}
PUBLIC = {"_replace", "_asdict", "_fields", "_getframe", "_exit"}  # of named tuples and of Python


def is_private(name):
    return name in INTERNAL or (name.startswith("_") and not name.startswith("__") and name not in PUBLIC)


def entries(name):
    """The names that a compat module looks up, "module:attributes"."""
    constants = {node.value for node in ast.walk(tree_of(name)) if isinstance(node, ast.Constant)}
    return sorted(x for x in constants if isinstance(x, str) and re.fullmatch(r"[\w.]+:[\w.]*[\w]", x))


def source(module):
    """The text of a module, which is not imported; "" for a package and for C."""
    package, *path = module.split(".")
    file = Path(importlib.util.find_spec(package).submodule_search_locations[0], *path).with_suffix(".py")
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def is_there(name):
    module, _, path = name.partition(":")
    *owner, last = path.split(".")
    if text := source(module):
        return all(re.search(rf"class {part}\b", text) for part in owner) and bool(re.search(rf"\b{last}\b", text))
    pkgutil.resolve_name(name)
    return True


def test_the_installed_releases_have_every_name():
    found = [name for module in COMPAT for name in entries(module)]
    assert len(found) > 50
    assert [name for name in found if not name.startswith("flash_attn") and not is_there(name)] == []


def test_what_is_missing_is_named_at_its_first_use():
    gone, unread = private("torch:_C._gone", "a thing"), attribute("torch.nn.modules.module:Module._gone", "a thing")
    for use in (gone, lambda: unread(nn.Linear(1, 1))):
        with pytest.raises(ConfigError, match=re.escape(importlib.metadata.version("torch"))):
            use()


def test_the_trainers_have_what_ours_extends():
    assert all(f"    def {name}(" in source("transformers.trainer") for name in EXTENDED)
    assert all(f"    def {name}(" in source("trl.trainer.dpo_trainer") for name in EXTENDED_OF_TRL)
    for module in ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer"):
        assert all(f"    def {name}(" in source(module) for name in EXTENDED_OF_ROLLOUTS)
    assert all(f"    def {name}(" in source("trl.generation.vllm_generation") for name in EXTENDED_OF_VLLM)
    with pytest.raises(ConfigError, match="_prepare_for_training"):
        check_trainer(object)
    with pytest.raises(ConfigError, match="_calculate_rewards"):
        check_rollouts(type("GRPOTrainer", (), {"__module__": "trl.trainer.grpo_trainer"}))


GRPO = """
def _calculate_rewards(self, x):
    return gather(x)

def _generate_and_score_completions(self, x):
    assert self.accelerator.gather
    return [gather_object(y) for y in x]
"""
# what a release may change, after which a call would count ranks -> (what it changes, to what, the method)
CHANGED = {
    "moved": ("[gather_object(y) for y in x]", "self._log(x)\n\ndef _log(self, x):\n    gather_object(x)", "_generate"),
    "one more": ("    return gather(x)", "    return gather(x), gather_object(x)", "_calculate_rewards"),
    "of a module": ("return gather(x)", "return accelerate.utils.gather(x)", "_calculate_rewards"),
    "of the accelerator": ("return gather(x)", "return self.accelerator.gather(x)", "_calculate_rewards"),
    "by another name": ("return gather(x)", "return collected(x)", "_calculate_rewards"),
}


def trainer_of(text):
    scope = {
        "__name__": "trl.trainer.grpo_trainer",
        "gather": utils.gather,
        "gather_object": utils.gather_object,
        "collected": utils.gather,
    }
    exec(text, scope)
    methods = {name: x for name, x in scope.items() if name.startswith("_") and isinstance(x, types.FunctionType)}
    return type("GRPOTrainer", (), {**methods, "__module__": "trl.trainer.grpo_trainer"})


def test_calls_that_count_ranks_are_where_they_are_replaced():
    check_calls(trainer_of(GRPO))
    for before, after, method in CHANGED.values():
        assert before in GRPO
        with pytest.raises(ConfigError, match=rf"GRPOTrainer\.{method}.*as in trl.*install one of those"):
            check_calls(trainer_of(GRPO.replace(before, after)))


HAS_GATHER = types.SimpleNamespace(accelerator=types.SimpleNamespace(gather=abs))


def counted(function):
    @functools.wraps(function)
    def wrapped(*args):
        return function(*args)

    return wrapped


def test_a_copy_with_other_globals_reads_them():
    methods = trainer_of(GRPO)
    inner = methods._generate_and_score_completions
    for function in (inner, counted(inner)):
        own = rebound(function, {"gather_object": lambda x: -x}, "a count")
        assert own(HAS_GATHER, [1, 2]) == [-1, -2]
        with pytest.raises(ConfigError, match=r"a count needs .* with a call of gather, as in"):
            rebound(function, {"gather": abs}, "a count")
    held = functools.update_wrapper(types.FunctionType(counted.__code__, {}), inner)
    with pytest.raises(ConfigError, match="in the closure of its decorator"):
        rebound(held, {"gather_object": abs}, "a count")


def test_the_newest_releases_that_were_seen_are_those_installed_here():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split())
    assert [name for name, seen in SEEN.items() if name in pins and pins[name] not in seen] == []


def defined(name):
    """Private names that a module of ours defines, or sets on its own objects."""
    found = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if getattr(node.value, "id", "") == "self" else set()
    return found


def private_uses(name):
    """Yield (line, name) of what a module uses of other packages' private names."""
    ours = defined(name).union(*(defined(other) for other in imported(name) if other in MODULES))
    for node in ast.walk(tree_of(name)):
        used = []
        if isinstance(node, ast.Attribute):
            used = [node.attr]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            used = [part for alias in node.names for part in alias.name.split(".")]
            used += (getattr(node, "module", None) or "").split(".")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            used = [x.value for x in node.args[1:2] if isinstance(x, ast.Constant)]
        extends = isinstance(node, ast.Attribute) and _is_super(node.value)
        known = {*EXTENDED, *EXTENDED_OF_TRL, *EXTENDED_OF_ROLLOUTS, *EXTENDED_OF_VLLM} if extends else ours
        for word in used:
            if is_private(word) and word not in known and not word.startswith("_sequence_parallel"):
                yield node.lineno, word


def _is_super(node):
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "super"


def test_private_names_are_used_nowhere_else():
    assert {name: found for name in MODULES if name not in COMPAT and (found := list(private_uses(name)))} == {}
