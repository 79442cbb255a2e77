"""What is drawn for the commands: a command line, and the files that it names, good by construction but for what is
wrong in them.

A case is a dict. words: the command line; env: what the environment has beside; files: name -> text, None for a folder.
In a text `<<digits:N>>` stands for a number of N digits, `<<deep:N>>` for N lists inside one another, `<<long:N>>` for
N letters, and a lone surrogate for a byte that is no UTF-8.
"""

import copy
import json
import random
import re

from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.sharding.layout import LAYOUTS
from ds_seqpar.planner.machine import presets

# sizes that are right and larger than a command can work on
HUGE = ("4096", "1000000", "1000000000000037", "<<digits:19>>")
# as they stand in a JSON file
ODD = (
    "null", "true", "0", "-1", "1", "3", "1.5", "NaN", "Infinity", "1e308", "1e-308", '""', '"auto"', '"false"',
    '"x"', '"\\ud800"', "[]", "{}", '{"a": 1}', "[null]", '{"enabled": "yes"}', "<<digits:20>>", "<<digits:5000>>",
    "<<deep:31>>", "<<deep:100000>>", '"<<long:100000>>"', *HUGE,
)  # fmt: skip
# whole files; None: a folder
WRONG_FILES = (
    "", "null", "[]", "{", "{}", "nothing", '{"a": 1, "a": 2}', '{"a": 1,}', "\ufeff{}", '{"a": "\udcff"}', "\x00",
    "<<digits:5000>>", '{"a": <<deep:100000>>}', '{"a": "<<long:5000000>>"}', None,
)  # fmt: skip
NUMBERS = ("0", "-1", "3", "many", "", "1.5", "NaN", "inf", "٣", "<<digits:400>>", "<<digits:5000>>", *HUGE)
OUTPUTS = ("out.png", "out.svg", "out.xyz", "out", "", "missing/out.png", "folder", "/dev/full", "<<long:300>>.png",
           "\udcff.png", "a\nb.png")  # fmt: skip
DOCUMENTS = ("1 2 3", "0", "-1", "1.5", "", "x", "\udcff", "<<digits:5000>>", "<<long:5000000>>", None)
WORDS = ("auto", "Zigzag", "kv", "q", "", "x", *SCHEDULES, *LAYOUTS)

SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2,
         "vocab_size": 512, "intermediate_size": 96}  # fmt: skip
MODELS = (
    {"model_type": "llama", **SIZES, "head_dim": 8, "hidden_act": "silu", "dtype": "bfloat16", "torch_dtype": "float16",
     "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 10000.0, "tie_word_embeddings": False,
     "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "architectures": ["LlamaForCausalLM"]},
    {"model_type": "qwen3_moe", **SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
     "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [], "pad_token_id": 0},
    {"model_type": "gemma2", **SIZES, "head_dim": 8, "sliding_window": 128, "query_pre_attn_scalar": 8,
     "layer_types": ["full_attention", "sliding_attention"], "final_logit_softcapping": 30.0},
    {"model_type": "bert", "hidden_size": 64, "num_attention_heads": 8},
)  # fmt: skip
DEEPSPEED = (
    {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0, "steps_per_print": 10, "bf16": {"enabled": True}, "fp16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupLR", "params": {}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": 1000,
                              "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
        "sequence_parallel": {"size": 4, "ulysses": 2, "loss_tiles": "auto"},
    },
    {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
        "sequence_parallel": {},
    },
    {"sequence_parallel": {"schedule": "ring", "layout": "zigzag", "head_chunks": 2, "mlp_tiles": 4,
                           "machine": "h100-ib"},
     "zero_optimization": {"stage": 1}, "bfloat16": {"enabled": True}},
)  # fmt: skip
EXTRA = ("stage", "enabled", "size", "ulysses", "schedule", "layout", "ring_size", "rank_order", "seq_len",
         "head_chunks",
         "machine", "zero_optimization", "bf16", "amp", "torch_autocast", "checkpoint", "compile", "flops_profiler", "",
         "communication_data_type", "comms_logger", "elasticity", "hidden_act", "layer_types", "id2label",
         "_name_or_path", "auto_map", "attn_implementation", "quantization_config", "self", "per_node")  # fmt: skip
# the first five are good
SETS = (
    "size=2", "bf16.enabled=true", "zero_optimization.stage=2", "loss_tiles=4", "ulysses=2", "ulysses=16", "size=3",
    "layout=zigzag", "head_chunks=auto", "ring_size=0", "sequence_parallel.size=2", "machine=m.json", "rank_order=[]",
    "seq_len=<<digits:5000>>", "size=<<deep:100000>>", "size=NaN", "=", "x", ".=1", "..", "bf16=3",
    "bf16.enabled=false", 'bf16.enabled="false"', "fp16.enabled=true", "zero_optimization.stage=9",
    "zero_optimization.stage=1",
    "zero_optimization.stage.x=1", "zero_optimization.offload_optimizer.device=cpu", "a.b.c=1", "memory=auto",
    "zero_optimization.offload_optimizer.ratio=0.5", "zero_optimization.offload_param.device=nvme",
    "zero_optimization.sub_group_size=0", "zero_optimization.offload_optimizer.buffer_count=1e18",
    "train_micro_batch_size_per_gpu=-4",
)  # fmt: skip


def expanded(text):
    text = re.sub(r"<<digits:(\d+)>>", lambda found: "7" * int(found[1]), text)
    text = re.sub(r"<<deep:(\d+)>>", lambda found: "[" * int(found[1]) + "]" * int(found[1]), text)
    return re.sub(r"<<long:(\d+)>>", lambda found: "x" * int(found[1]), text)


def places(content, place=()):
    """Every key of a JSON content, from the outside in, as the keys that lead to it."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*place, key)
        yield from places(value, (*place, key))


def spoilt_text(draw, good):
    """A JSON file's text: of a good content with up to two values exchanged, or of no such file at all."""
    if draw.random() < 0.08:
        return draw.choice(WRONG_FILES)
    content, exchanged = copy.deepcopy(good), {}
    for number in range(draw.choice((0, 0, 0, 1, 1, 2))):
        *outer, key = draw.choice(list(places(content)))
        inside = content
        for name in outer:
            inside = inside[name]
        if isinstance(inside, dict):
            key = draw.choice((key, key, key, draw.choice(EXTRA)))
        inside[key], exchanged[f'"@{number}@"'] = f"@{number}@", draw.choice(ODD)
    text = json.dumps(content)
    for mark, odd in exchanged.items():
        text = text.replace(mark, odd)
    return text


# option -> (its chance, good values, odd ones); without values: a flag
MODEL = {
    "--model": (1, ("model",), ("", "nowhere", "folder", "<<long:300>>", "/dev/null")),
    "--seq-len": (1, ("512", "4096"), NUMBERS),
}
COMMON = {
    "--config": (0.6, ("ds.json",), ("nowhere",)),
    "--set": (0.4, SETS[:5], SETS),
    "--no-checkpointing": (0.2, (), ()),
    "--json": (0.3, (), ()),
    "--png": (0.1, ("out.png",), OUTPUTS),
}
COMMANDS = {
    "memory": {
        **MODEL,
        "--ranks": (1, ("4", "8", "6"), NUMBERS),
        "--machine": (0.3, ("h100-ib", "m.json"), ("x", "", "folder")),
        **COMMON,
    },
    "plan": {
        **MODEL,
        "--nodes": (0.5, ("1", "2"), NUMBERS),
        "--gpus-per-node": (1, ("4", "2", "8"), NUMBERS),
        "--machine": (1, ("h100-ib", "m.json"), ("x", "", "folder", "nowhere.json")),
        "--memory": (0.3, ("80", "0.5"), (*NUMBERS, "1e308", "1e-308")),
        "--sequences": (0.3, ("8",), NUMBERS),
        "--window": (0.2, ("512",), NUMBERS),
        "--documents": (0.3, ("docs",), ("nowhere", "")),
        **{name: values for name, values in COMMON.items() if name != "--png"},
    },
    "show": {
        "--size": (1, ("4", "8", "6", "16", "1"), NUMBERS),
        "--ulysses": (0.3, ("1", "2"), NUMBERS),
        "--schedule": (1, tuple(SCHEDULES), WORDS),
        "--layout": (0.2, tuple(LAYOUTS), WORDS),
        **{
            name: (0.06, ("2", "1", "4"), NUMBERS) for name in ("--ring-size", "--rows", "--cols", "--team", "--strips")
        },
        **{name: (0.07, WORDS, WORDS) for name in ("--rotate-forward", "--rotate-backward", "--comm-dtype")},
        "--rank-order": (0.07, ("ulysses_intra",), WORDS),
        "--overlap": (0.3, (), ()),
        "--full": (0.3, (), ()),
        "--program": (0.3, ("0", "1"), NUMBERS),
        "--seq": (0.3, ("64", "256"), NUMBERS),
        "--direction": (0.3, ("forward", "both"), WORDS),
        "--png": (0.1, ("out.png",), OUTPUTS),
        "--trace": (0.15, ("out",), OUTPUTS),
    },
    "tune": {
        "--model": (1, ("nowhere",), ("", "folder")),
        "--seq-len": (1, ("512",), NUMBERS),
        "--top": (0.5, ("2",), NUMBERS),
    },
}
# file that a command line names -> good contents
FILES = {"model": MODELS[:3], "ds.json": DEEPSPEED, "m.json": (presets()["h100-ib"], presets()["cpu"])}


def case(seed):
    """Always the same of a seed. One in four is good by construction, as far as options fit one another."""
    draw = random.Random(seed)
    spoilt, command = draw.random() < 0.75, draw.choice([*["memory", "plan"] * 8, *["show"] * 5, "tune"])
    words, files, env = [command], {"folder": None}, {}
    for name, (chance, good, odd) in COMMANDS[command].items():
        if draw.random() < chance - 0.03 * spoilt:
            values = odd if odd and spoilt and draw.random() < 0.07 else good
            words += [name, *([draw.choice(values)] if values else [])]
    for name in sorted(set(words) & FILES.keys()):
        content = draw.choice(FILES[name] + MODELS[3:] * (name == "model" and spoilt))
        files["model/config.json" if name == "model" else name] = (
            spoilt_text(draw, content) if spoilt else json.dumps(content)
        )
    if "docs" in words:
        files["docs"] = draw.choice(DOCUMENTS) if spoilt else "1024 3072"
    if command == "tune":
        launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        env = {name: draw.choice((value, value, "x")) for name, value in launched.items() if draw.random() < 0.9}
    if spoilt and draw.random() < 0.03:
        words.insert(draw.choice((0, 1, len(words))), draw.choice(("--nothing", "-x", "nothing", "--", "--help", "")))
    return {"words": words, "env": env, "files": files}
