"""A patched LLaMA on 4 ranks computes what the unpatched one does, and can be given back as it was."""

import copy
import itertools
from collections import Counter

import pytest
import torch
from transformers import LlamaForCausalLM

import ds_seqpar
from ds_seqpar.data.batch_layout import EQUAL
from hf_integration import patch_attention, patched_with, unpatch_attention, whole_sequences
from tests.dist.ranks import make, refusal
from tests.hf import llama as helpers
from tests.hf.llama import IGNORE, LAYOUTS, MODES, SEQ, array, averaged, gap, llama, one_process, ragged, small
from tests.launch import on_each_of
from tests.launch import on_engine_ranks as on_ranks
from tests.oracle import error
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
WORLD = 4
WAYS = [
    {**MODES[mode], "layout": layout} for mode, layout in (("u4", "zigzag"), ("r4", "striped"), ("u2r2", "contiguous"))
]
# query and key/value heads: MHA, GQA with fewer kv heads than 4 Ulysses members, MQA, and such that no members divide
HEADS = ((8, 8), (8, 2), (8, 1), (6, 3))


def tokens(rows=2, seq=SEQ, seed=1):
    return torch.randint(3, 64, (rows, seq), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def sharded_logits(model, sp, ids, **kwargs):
    """Logits of the patched model for whole sequences, in global order."""
    local = model(
        input_ids=sp.shard(ids, 1), position_ids=sp.position_ids(ids.shape[1])[None], placement=EQUAL, **kwargs
    ).logits
    return sp.gather(local, 1)


def logits_errors():
    """By dtype: (error against the unpatched model, the unpatched model's own error against fp64) of each way and head
    count."""
    found, sps = {}, [make(**section) for section in WAYS]
    for dtype, (heads, kv_heads) in itertools.product((torch.float64, torch.bfloat16), HEADS):
        model = small(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=8 * heads).to(dtype)
        exact = copy.deepcopy(model).double()
        with torch.no_grad():
            plain, true = model(tokens()).logits, exact(tokens()).logits
        for sp in sps:
            model.patch_attention(sp)
            logits = sharded_logits(model, sp, tokens())
            found.setdefault(dtype, []).append((error(logits.double(), plain.double()), error(plain.double(), true)))
            model.unpatch_attention()
    return found


def test_logits_are_those_of_the_unpatched_model():
    """deepspeed#7384, #7842: silently wrong attention. verl#850, prime-rl#3042: fewer kv heads than ranks.
    ring-flash-attention#42, #67: block outputs in bf16 add up. Both models' rounding noise, one apart each way."""
    for found in on_ranks(WORLD, logits_errors):
        assert len(found[torch.float64]) == len(found[torch.bfloat16]) == len(WAYS) * len(HEADS)
        assert max(difference for difference, _ in found[torch.float64]) < 1e-10
        for difference, noise in found[torch.bfloat16]:
            assert difference < 2 * noise < 0.05


@on_each_of(WORLD)
def test_a_label_on_the_first_padding_token_is_exact():
    """The end of a text is often its padding token: predicted from a real token, it counts as in the plain run.
    TransformerEngine#3331, #1930: tail padding drops real keys. A mask of ones is no mask."""
    ids = tokens(rows=3)
    mask = (torch.arange(SEQ) < torch.tensor([[SEQ], [29], [5]])).long()
    ends = (torch.arange(SEQ) <= torch.tensor([[SEQ], [29], [5]])).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(ends == 0, IGNORE)}
    plain = small()
    plain_loss = plain(**batch).loss
    plain_loss.backward()
    expected = {name: array(p.grad) for name, p in plain.named_parameters()}
    for layout in LAYOUTS:
        sp, model = make(**MODES["u2r2"], layout=layout), small()
        patch_attention(model, sp)
        shard = sp.shard_batch(batch)
        for given in ({}, {"attention_mask": torch.ones_like(shard["input_ids"])}):
            model.zero_grad()
            loss = model(**shard, **given).loss
            loss.backward()
            assert sp.mean_loss(loss) == pytest.approx(plain_loss.item(), abs=1e-5)
            assert gap(averaged(model), expected) < 1e-5


def autocast_errors(section):
    """Of gradients under autocast to bf16, against fp32: unpatched, and patched; and in which dtypes attention ran."""
    sp, found = make(**section), []
    window = ragged(section, 1, 1)
    exact, _ = one_process(llama(), window)
    for patched in (False, True):
        model = llama()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if patched:
                patch_attention(model, sp)
                dtypes = seen_dtypes(sp)
                (batch,) = sp.shard_batches(window)
                loss = model(**batch).loss
            else:
                window_loss = model(input_ids=window[0]["input_ids"]).logits[:, :-1].float()
                loss = torch.nn.functional.cross_entropy(
                    window_loss.flatten(0, 1), window[0]["labels"][:, 1:].flatten()
                )
        loss.backward()
        mine = {name: array(p.grad) for name, p in model.named_parameters()}
        found.append(gap(averaged(model) if patched else mine, exact))
    return *found, dtypes


def seen_dtypes(sp):
    """A set that fills with the dtypes of queries that this SequenceParallel's attention is given."""
    seen, forward = set(), sp.runtime.forward

    def watched(tensors, *rest):
        seen.add(str(tensors[0].dtype))
        return forward(tensors, *rest)

    sp.runtime.forward = watched
    return seen


def test_autocast_is_as_near_as_the_unpatched_models():
    """RoPE leaves q and k in fp32 beside a bf16 v; attention runs in bf16 all the same, as sdpa does."""
    for noise, difference, dtypes in on_ranks(WORLD, autocast_errors, MODES["u2r2"]):
        assert difference < 2 * noise < 0.05
        assert dtypes == {"torch.bfloat16"}


def generated(model, seed, padded):
    """Greedy tokens, of two prompts padded on the left."""
    ids = tokens(rows=3, seq=11, seed=seed)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4], mask[2, :7] = 0, 0
        ids = ids.masked_fill(mask == 0, 0)
    options = {"do_sample": False, "max_new_tokens": 3, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(input_ids=ids, attention_mask=mask, **options).tolist()


def generate_everywhere(stage):
    """Whether a patched model generates as its unpatched twin: before and after training steps, train() and eval(),
    with and without padding, together and each rank its own prompts; and whether the latter sent anything."""
    case = MODES["r2"]
    engine, *_ = ds_seqpar.initialize(model=llama(), config=helpers.settings(case, stage, 1, 4, **helpers.adam(1e-2)))
    sp, model = engine.sequence_parallel, engine.module
    same, sent = [], []
    for trained in (False, True):
        if trained:
            helpers.update(engine, sp.shard_batches(ragged(case, 1, 1, seed=0)))
        twin = llama()
        twin.load_state_dict({name: torch.from_numpy(x) for name, x in helpers.weights(model).items()})
        assert twin.config._attn_implementation == "sdpa"
        for training in (True, False):
            for padded in (True, False):
                same.append(generated(model.train(training), 0, padded) == generated(twin.train(training), 0, padded))
                before = Counter(sp.comm.received)
                with whole_sequences(model):
                    local = generated(model, sp.rank, padded)
                sent.append(sp.comm.received - before)
                same.append(local == generated(twin, sp.rank, padded))
    helpers.update(engine, sp.shard_batches(ragged(case, 1, 1, seed=3)))  # and training goes on
    return same, sent, bool(sp.comm.received)


@pytest.mark.parametrize("stage", [*(pytest.param(s, marks=pytest.mark.slow) for s in ("0", "2")), "3"])
def test_generate_is_that_of_the_unpatched_model(stage):
    """accelerate#4177: masks discarded, here of prompts padded on the left."""
    for same, sent, trained in on_ranks(2, generate_everywhere, stage):
        assert same == [True] * 16
        assert not any(sent)
        assert trained


def come_and_go():
    """What must be true, in order: patched, once more, with another, and unpatched, twice; and what is said of another
    SequenceParallel."""
    sp, other, model, said = make(**MODES["r2"]), make(**MODES["r2"]), llama(), []

    def state():
        return [(len(m._forward_pre_hooks), sorted(vars(m))) for m in model.modules()]

    with torch.no_grad():
        plain, before, found = model(tokens()).logits, state(), []
    for _ in range(2):
        found += [patch_attention(model, sp) is model, patched_with(model) is sp]
        found.append(copy.deepcopy(model.config)._attn_implementation == "sdpa")
        patched = state()
        patch_attention(model, sp)
        said.append(refusal(patch_attention, model, other))
        found += [state() == patched, patched_with(model) is sp]
        found.append(error(sharded_logits(model, sp, tokens()), plain) < 1e-5)
        copied = copy.deepcopy(model)
        found.append(error(sharded_logits(copied, sp, tokens()), plain) < 1e-5)
        model.set_attn_implementation("eager")  # of local forwards
        found.append(error(sharded_logits(model, sp, tokens()), plain) < 1e-5)
        model.set_attn_implementation("sdpa")
        found += [unpatch_attention(model) is model, patched_with(model) is None, state() == before]
        with torch.no_grad():
            found.append(torch.equal(model(tokens()).logits, plain))
    unpatch_attention(model)  # a model that is not patched stays as it is
    eager = llama(attn_implementation="eager").patch_attention(sp).unpatch_attention()
    return [*found, eager.config._attn_implementation == "eager"], said


def test_a_model_is_patched_once_and_given_back():
    """axolotl#3498: partitioned twice."""
    for found, said in on_ranks(2, come_and_go):
        assert found == [True] * 25
        for kind, message in said:
            assert kind == "ConfigError"
            assert missing(message, "another SequenceParallel", "unpatch_attention(model)") == []


def two_models():
    """Two models, two SequenceParallels, in turns, a third unpatched; all made from one config object, as users do."""
    sps = [make(size=2, ulysses=2), make(size=4, ulysses=1, layout="striped")]
    config = llama().config
    torch.manual_seed(1)
    models = [LlamaForCausalLM(config) for _ in range(3)]
    before = config.to_dict(), config._attn_implementation
    with torch.no_grad():
        plain = [model(tokens()).logits for model in models]
    found = []
    for model, sp in zip(models, sps, strict=False):
        patch_attention(model, sp)
    for _ in range(2):
        for model, sp, logits in zip(models, sps, plain, strict=False):
            found.append(error(sharded_logits(model, sp, tokens()), logits) < 1e-5)
        with torch.no_grad():
            found.append(torch.equal(models[2](tokens()).logits, plain[2]))
    unpatch_attention(models[1])
    with torch.no_grad():
        found.append(torch.equal(models[1](tokens()).logits, plain[1]))
    found.append(error(sharded_logits(models[0], sps[0], tokens()), plain[0]) < 1e-5)
    return [*found, models[2].config is config, before == (config.to_dict(), config._attn_implementation)]


def test_two_models_with_settings_of_their_own_take_turns():
    """deepspeed#8291: head counts kept once a process gave the second model the first one's split, and hung."""
    assert on_ranks(WORLD, two_models) == [[True] * 10] * WORLD
