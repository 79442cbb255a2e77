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

from ds_seqpar.compiler.schedules import SCHEDULES
from ds_seqpar.compiler.sharding.layout import LAYOUTS
from ds_seqpar.planner.machine import presets

# sizes that are right and larger than a command can work on
HUGE = ("4096", "1000000", "1000000000000037", "100000000000000000", "<<digits:19>>")

# as they stand in a JSON file
ODD = (
    "null", "true", "false", "0", "-1", "-4", "1", "2", "3", "9", "1.5", "NaN", "Infinity", "-Infinity", "1e308",
    "1e-308", "1e999", "5e-324", '""', '"auto"', '"false"', '"3"', '"x"', '"\\ud800"', "[]", "{}", "[1]", '{"a": 1}',
    "[null]", '{"enabled": "yes"}', '{"": {}}', "<<digits:20>>", "-<<digits:19>>", "<<digits:400>>", "<<digits:5000>>",
    "<<deep:31>>", "<<deep:500>>", "<<deep:100000>>", '"<<long:100000>>"', *HUGE,
)  # fmt: skip
# whole files; None: a folder, "missing": none
WRONG_FILES = (
    "", " ", "null", "3", "[]", '"x"', "{", "{}", "nothing", '{"a": 1, "a": 2}', '{"a": 1,}', "{'a': 1}", "\ufeff{}",
    '{"a": "\udcff"}', "\udcff\udcfe", "\x00", "<<digits:5000>>", "<<deep:100000>>", '{"a": <<deep:100000>>}',
    '{"a": "<<long:5000000>>"}', None, "missing",
)  # fmt: skip
NUMBERS = ("0", "-1", "1", "3", "many", "", " ", "1.5", "1e3", "NaN", "inf", "٣", "0x10", "<<digits:20>>",
           "<<digits:400>>", "<<digits:5000>>", *HUGE)  # fmt: skip
OUTPUTS = ("out.png", "out.svg", "out.pgf", "out.xyz", "out", "", "missing/out.png", "folder", "folder/", "/dev/full",
           "<<long:300>>.png", "é.png", "\udcff.png", "a\nb.png")  # fmt: skip
DOCUMENTS = ("1024 3072", "4096\n", "1 2 3", "2048\n" * 8, "٣ 5", "0", "-1", "1.5", "", "x", "\udcff",
             "<<digits:5000>>", "<<digits:400>>", "<<digits:1000000>>", "<<long:5000000>>", "<<digits:19>> 1",
             None)  # fmt: skip
WORDS = ("auto", "zigzag", "Zigzag", "ring", "kv", "q", "", "x", *SCHEDULES, *LAYOUTS)

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
GOOD_SETS = 5  # of these, from the first on
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


class Drawing:
    """A case that is being drawn, always the same of a seed. One in four is good by construction, as far as options
    fit one another."""

    def __init__(self, seed):
        self.draw, self.words, self.files, self.env = random.Random(seed), [], {"folder": None}, {}
        self.spoilt = self.by(0.75)

    def by(self, chance):
        return self.draw.random() < chance

    def pick(self, *values):
        return self.draw.choice(values)

    def option(self, name, *values, odd=(), chance=0.97):
        """By chance, with one of the values; in a spoilt case now and then with an odd one."""
        if self.by(chance) or (chance > 0.9 and not self.spoilt):
            self.words.append(name)
            odd = odd if self.spoilt and self.by(0.07) else ()
            self.words += [self.pick(*(odd or values))] if values else []

    def file(self, name, good):
        """Draws a file, and returns what a command is to call it."""
        text = spoilt_text(self.draw, good) if self.spoilt else json.dumps(good)
        if text != "missing":
            self.files[name] = text
        return name

    def model(self):
        folder = self.pick("model", "model", "model", ".")
        file = self.file(f"{folder}/config.json", self.pick(*MODELS[:1], *MODELS[: None if self.spoilt else 3]))
        self.option("--model", folder, folder, file, odd=("", "nowhere", "folder", "<<long:300>>", "/dev/null"))

    def settings(self):
        if self.by(0.6):
            self.words += ["--config", self.file("ds.json", self.pick(*DEEPSPEED))]
        for _ in range(self.pick(0, 0, 0, 1, 2)):
            self.words += ["--set", self.pick(*SETS[: None if self.spoilt else GOOD_SETS])]
        self.option("--no-checkpointing", chance=0.2)
        self.option("--json", chance=0.3)
        self.option("--png", *OUTPUTS, chance=0.15)


def memory(its):
    its.model()
    its.option("--seq-len", "512", "4096", "1000", odd=NUMBERS)
    its.option("--ranks", "4", "8", "16", "6", odd=NUMBERS)
    if its.by(0.3):
        its.option("--machine", "h100-ib", its.file("m.json", presets()["cpu"]), odd=("x", "", "folder"))
        its.option("--memory", "80", "0.5", odd=(*NUMBERS, "1e308", "1e-308", "nan"), chance=0.5)
    its.settings()


def plan(its):
    its.model()
    its.option("--seq-len", "4096", odd=(*NUMBERS, "16384"))
    its.option("--nodes", "1", "2", odd=NUMBERS, chance=0.5)
    its.option("--gpus-per-node", "4", "2", "8", "1", odd=NUMBERS)
    machine = its.file("m.json", presets()["h100-ib"])
    its.option("--machine", "h100-ib", machine, machine, odd=("x", "", "folder", "nowhere.json"))
    its.option("--memory", "80", "0.5", odd=(*NUMBERS, "1e308", "1e-308", "nan"), chance=0.3)
    its.option("--sequences", "8", odd=NUMBERS, chance=0.3)
    its.option("--window", "512", odd=NUMBERS, chance=0.2)
    if its.by(0.3):
        its.files["docs"] = its.pick(*DOCUMENTS[: None if its.spoilt else 1])
        its.option("--documents", "docs", odd=("nowhere", ""), chance=1)
    its.settings()
    its.option("--perfetto", *OUTPUTS, chance=0.15)


def show(its):
    its.option("--size", "4", "8", "6", "16", "1", odd=NUMBERS)
    its.option("--ulysses", "1", "2", odd=NUMBERS, chance=0.3)
    its.option("--schedule", *SCHEDULES, odd=WORDS)
    its.option("--layout", *LAYOUTS, odd=WORDS, chance=0.2)
    for name in ("--ring-size", "--rows", "--cols", "--team", "--strips"):
        its.option(name, "2", "1", "4", odd=NUMBERS, chance=0.06)
    for name in ("--rotate-forward", "--rotate-backward", "--comm-dtype", "--rank-order"):
        its.option(name, *WORDS, "bf16", "ulysses_intra", chance=0.07)
    for name, count in (("--heads", 2), ("--mesh", 3)):
        if its.by(0.15):
            its.words += [name, *(its.pick("2", "8", "1", *NUMBERS) for _ in range(count))]
    its.option("--overlap", chance=0.3)
    its.option("--full", chance=0.3)
    its.option("--program", "0", "1", odd=NUMBERS, chance=0.3)
    its.option("--seq", "64", "256", odd=NUMBERS, chance=0.3)
    its.option("--direction", "forward", "both", odd=WORDS, chance=0.3)
    its.option("--png", *OUTPUTS, chance=0.15)
    its.option("--trace", *OUTPUTS, chance=0.15)


def calibrate(its):
    its.option("-o", *OUTPUTS, chance=0.5)
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    its.env = {name: value for name, value in launched.items() if its.by(0.9)}
    if its.env and its.by(0.5):
        its.env[its.pick(*its.env)] = its.pick("", "x", "-1", "0", "<<digits:5000>>")


COMMANDS = {"memory": memory, "plan": plan, "show": show, "calibrate": calibrate}


def case(seed):
    its = Drawing(seed)
    name = its.pick(*["memory", "plan"] * 8, *["show"] * 5, "calibrate")
    COMMANDS[name](its)
    words = [name, *its.words]
    if its.spoilt and its.by(0.03):
        words.insert(its.pick(0, 1, len(words)), its.pick("--nothing", "-x", "nothing", "--", "--help", ""))
    return {"words": words, "env": its.env, "files": its.files}
