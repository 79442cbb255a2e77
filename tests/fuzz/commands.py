"""What is drawn for the commands: a command line, and the files that it names, good by construction but for what is
wrong in them.

A case is a dict. words: the command line; env: what the environment has beside; files: name -> text, None for a folder.
In a text `<<digits:N>>` stands for a number of N digits, `<<deep:N>>` for N lists inside one another, `<<long:N>>` for
N letters, and a lone surrogate for a byte that is no UTF-8.
"""

import copy
import json
import re

from hypothesis import strategies as st

from ds_seqpar.planning.layout import NAMED
from ds_seqpar.planning.machine import presets
from ds_seqpar.planning.schedules import SCHEDULES

# sizes that are right and larger than a command can work on: `True` once the commands refuse them
HUGE_SIZES = False
HUGE = ("4096", "1000000", "1000000000000037", "100000000000000000") if HUGE_SIZES else ()

# as they stand in a JSON file
ODD = (
    "null", "true", "false", "0", "-1", "-4", "1", "2", "3", "9", "1.5", "NaN", "Infinity", "-Infinity", "1e308",
    "1e-308", "1e999", "5e-324", '""', '"auto"', '"false"', '"3"', '"x"', '"\\ud800"', "[]", "{}", "[1]", '{"a": 1}', "[null]",
    '{"enabled": "yes"}', '{"": {}}', "<<digits:19>>", "-<<digits:19>>", "<<digits:400>>", "<<digits:5000>>",
    "<<deep:31>>", "<<deep:500>>", "<<deep:100000>>", '"<<long:100000>>"', *HUGE,
)  # fmt: skip
# whole files; None: a folder, "missing": none
WRONG_FILES = (
    "", " ", "null", "3", "[]", '"x"', "{", "{}", "nothing", '{"a": 1, "a": 2}', '{"a": 1,}', "{'a': 1}", "\ufeff{}",
    '{"a": "\udcff"}', "\udcff\udcfe", "\x00", "<<digits:5000>>", "<<deep:100000>>", '{"a": <<deep:100000>>}',
    '{"a": "<<long:5000000>>"}', None, "missing",
)  # fmt: skip
NUMBERS = ("0", "-1", "1", "3", "many", "", " ", "1.5", "1e3", "NaN", "inf", "٣", "0x10", "<<digits:19>>",
           "<<digits:400>>", "<<digits:5000>>", *HUGE)  # fmt: skip
OUTPUTS = ("out.png", "out.svg", "out.pgf", "out.xyz", "out", "", "missing/out.png", "folder", "folder/", "/dev/full",
           "<<long:300>>.png", "é.png", "\udcff.png", "a\nb.png")  # fmt: skip
WORDS = ("auto", "zigzag", "Zigzag", "ring", "kv", "q", "", "x", *SCHEDULES, *NAMED)

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
    {"sequence_parallel": {"schedule": "ring", "layout": "zigzag", "head_stages": 2, "mlp_tiles": 4,
                           "machine": "h100-ib"},
     "zero_optimization": {"stage": 1}, "bfloat16": {"enabled": True}},
)  # fmt: skip
EXTRA = ("stage", "enabled", "size", "ulysses", "schedule", "layout", "window", "placement", "seq_len", "head_stages",
         "machine", "zero_optimization", "bf16", "amp", "torch_autocast", "checkpoint", "compile", "flops_profiler", "",
         "communication_data_type", "comms_logger", "elasticity", "hidden_act", "layer_types", "id2label",
         "_name_or_path", "auto_map", "attn_implementation", "quantization_config", "self", "per_node")  # fmt: skip
SETS = ("size=2", "ulysses=2", "ulysses=16", "size=3", "zero_optimization.stage=9", "zero_optimization.stage=1",
        "bf16=3", "bf16.enabled=false", 'bf16.enabled="false"', "fp16.enabled=true",
        "train_micro_batch_size_per_gpu=-4", "a.b.c=1", "zero_optimization.offload_optimizer.device=cpu", "zero_optimization.stage.x=1", "seq_len=<<digits:5000>>",
        "size=<<deep:100000>>", "size=NaN", "=", "x", ".=1", "..", "layout=zigzag", "loss_tiles=4", "head_stages=auto",
        "sequence_parallel.size=2", "machine=m.json", "window=0", "placement=[]")  # fmt: skip


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


@st.composite
def texts(draw, good):
    """A JSON file's text: of a good content, with up to two values exchanged, or no such file at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(WRONG_FILES))
    content, exchanged = copy.deepcopy(good), {}
    for number in range(draw(st.sampled_from((0, 1, 1, 1, 2)))):
        *outer, key = draw(st.sampled_from(list(places(content))))
        inside = content
        for name in outer:
            inside = inside[name]
        if isinstance(inside, dict):
            key = draw(st.sampled_from((key, key, key, draw(st.sampled_from(EXTRA)))))
        inside[key], exchanged[f'"@{number}@"'] = f"@{number}@", draw(st.sampled_from(ODD))
    text = json.dumps(content)
    for mark, odd in exchanged.items():
        text = text.replace(mark, odd)
    return text


class Drawing:
    """A case that is being drawn."""

    def __init__(self, draw):
        self.draw, self.words, self.files, self.env = draw, [], {"folder": None}, {}

    def often(self, one_in=8):
        return self.draw(st.integers(1, one_in)) > 1

    def pick(self, *values):
        return self.draw(st.sampled_from(values))

    def option(self, name, *values, odd=(), seldom=False):
        """At times left out; seldom: mostly. With one of the values, or at times of the odd ones."""
        if self.often(3 if seldom else 30) != seldom:
            self.words += [
                name,
                *([self.pick(*values) if self.often() or not odd else self.pick(*odd)] if values else []),
            ]

    def file(self, name, good):
        """Draws a file, and returns what a command is to call it."""
        text = self.draw(texts(good))
        if text != "missing":
            self.files[name] = text
        return name

    def model(self):
        folder = self.pick("model", "model", "model", ".")
        file = self.file(f"{folder}/config.json", self.pick(*MODELS[:1], *MODELS))
        self.option("--model", folder, folder, file, odd=("", "nowhere", "folder", "<<long:300>>", "/dev/null"))

    def settings(self):
        if self.often(2) or not self.often(3):
            self.words += ["--config", self.file("ds.json", self.pick(*DEEPSPEED))]
        for _ in range(self.pick(0, 0, 0, 1, 2)):
            self.words += ["--set", self.pick(*SETS)]
        self.option("--no-checkpointing", seldom=True)
        self.option("--json", seldom=True)
        self.option("--png", *OUTPUTS, seldom=not self.often(3))


def memory(its):
    its.model()
    its.option("--seq-len", "512", "4096", "1000", odd=NUMBERS)
    its.option("--ranks", "1", "4", "8", "6", odd=NUMBERS)
    its.settings()


def plan(its):
    its.model()
    its.option("--seq-len", "4096", "16384", odd=NUMBERS)
    its.option("--nodes", "1", "2", odd=NUMBERS)
    its.option("--gpus-per-node", "1", "2", "4", odd=NUMBERS)
    its.option(
        "--machine", "h100-ib", its.file("m.json", presets()["h100-ib"]), odd=("x", "", "folder", "nowhere.json")
    )
    its.option("--memory", "80", "0.5", odd=(*NUMBERS, "1e308", "1e-308", "nan"), seldom=True)
    its.option("--sequences", "8", odd=NUMBERS, seldom=True)
    its.option("--window", "512", odd=NUMBERS, seldom=True)
    if not its.often(4):
        its.files["docs"] = its.pick(
            "1024 3072", "4096\n", "1 2 3", "٣ 5", "0", "-1", "1.5", "", "x", "\udcff", "<<digits:5000>>",
            "<<digits:400>>", "<<digits:1000000>>", "<<long:5000000>>", "<<digits:19>> 1", None,
        )  # fmt: skip
        its.words += ["--documents", its.pick("docs", "docs", "nowhere", "")]
    its.settings()
    its.option("--perfetto", *OUTPUTS, seldom=True)


def show(its):
    its.option("--size", "4", "8", "6", "16", "1", odd=NUMBERS)
    its.option("--ulysses", "1", "2", odd=NUMBERS, seldom=True)
    its.option("--schedule", *SCHEDULES, odd=WORDS)
    its.option("--layout", *NAMED, odd=WORDS, seldom=True)
    for name in ("--window", "--rows", "--cols", "--team", "--strips"):
        its.option(name, "2", "1", "4", odd=NUMBERS, seldom=not its.often(6))
    for name in ("--forward", "--backward", "--travel-dtype", "--placement", "--mesh"):
        its.option(name, *WORDS, "bf16", "2,2", "2 2", seldom=not its.often(6))
    if not its.often(4):
        its.words += ["--heads", its.pick("8", "32", *NUMBERS), its.pick("8", "2", *NUMBERS)]
    its.option("--overlap", seldom=True)
    its.option("--full", seldom=True)
    its.option("--program", "0", "1", odd=NUMBERS, seldom=True)
    its.option("--seq", "64", "256", odd=NUMBERS, seldom=True)
    its.option("--direction", "forward", "both", odd=WORDS, seldom=True)
    its.option("--png", *OUTPUTS, seldom=not its.often(3))
    its.option("--trace", *OUTPUTS, seldom=True)


def calibrate(its):
    its.option("-o", *OUTPUTS, seldom=True)
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_RANK": "0"}
    its.env = {name: value for name, value in launched.items() if its.often(4)}
    if its.env and its.often(2):
        its.env[its.pick(*sorted(its.env))] = its.pick("", "x", "-1", "<<digits:5000>>")


COMMANDS = {"memory": memory, "plan": plan, "show": show, "calibrate": calibrate}


@st.composite
def cases(draw):
    its = Drawing(draw)
    name = its.pick("memory", "memory", "memory", "plan", "plan", "show", "show", "calibrate")
    COMMANDS[name](its)
    words = [name, *its.words]
    if not its.often(20):
        words.insert(
            its.pick(0, 1, len(words)), its.pick("--nothing", "-x", "nothing", "--", "--help", "--local_rank=x", "")
        )
    return {"words": words, "env": its.env, "files": its.files}
