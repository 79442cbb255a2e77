"""Every supported family: local forwards, its windows, and what it cannot have. Its numbers: test_conformance.py."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_seqpar.base.errors import ConfigError
from hf_integration import check_patch, whole_sequences
from hf_integration.look.known import windows
from tests.dist.ranks import make
from tests.hf.families import FAMILIES, SIZE, model_of
from tests.launch import on_each_of


@on_each_of(2, timeout=600)
def test_a_local_forward_uses_the_attention_that_the_model_had():
    """With a cache, and of whole sequences; each rank tries other families. Windows, softcap and sinks too: sdpa has
    none of the last two."""
    sp = make(size=2, ulysses=1)
    ids = torch.randint(3, 64, (2, 24), generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(24) >= torch.tensor([[0], [5]])).long()
    given = {"input_ids": ids, "attention_mask": mask}
    for name in sorted(FAMILIES)[sp.rank :: 2]:
        quiet = {"output_router_logits": False} if "output_router_logits" in FAMILIES[name] else {}
        for before in ("eager", "sdpa"):
            model = model_of(name, 5, **quiet).eval()
            if before == "sdpa" and not model._supports_sdpa:
                continue
            model.set_attn_implementation(before)
            wanted = local(model, given)
            model.patch_attention(sp)
            with whole_sequences(model):
                assert all(map(torch.equal, local(model, given), wanted)), (name, before)


@torch.no_grad()
def local(model, given):
    how = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    return model(**given, use_cache=True).logits, model.generate(**given, **how)


def test_windows_are_those_of_the_config():
    assert windows(model_of("mistral", 7)) == [7, 7]
    assert windows(model_of("qwen2", 7)) == [7, None]
    assert windows(model_of("qwen2", 7, use_sliding_window=False)) == [None, None]
    assert windows(model_of("llama")) == [None, None]


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("mistral", {"attention_dropout": 0.1}, "attention_dropout"),
        ("gpt_oss", {"attention_dropout": 0.1}, "attention_dropout"),
        ("jamba", {"num_experts": 2, "num_experts_per_tok": 1}, r"layers\.0\.mamba.*outside of"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_what_a_family_cannot_have_and_attention_of_another_kind_are_refused_by_name(family, changes, words):
    given = {name: x for name, x in FAMILIES.get(family, {}).items() if name != "window"}
    config = AutoConfig.for_model(family, **{**SIZE, **given, **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=words):
        check_patch(model, None)
