"""Whole calls that cannot be, and ranks that do not look at a whole output together: a sentence on every rank."""

import contextlib
import io
import time

import pytest
import torch
import torch.distributed as dist

from ds_seqpar.base.errors import CommunicationError
from ds_seqpar.guards import waits
from hf_integration import share_sequences
from tests.dist.ranks import is_one_sentence, make, refusal
from tests.grids import each_then_rest
from tests.hf.llama import MODES, small
from tests.hf.losses import local_mean
from tests.launch import on_each_of, on_ranks
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")


def ids(seed=0):
    return torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(seed))


def half(sp, *names):
    """A sharded batch with these of its parts alone."""
    shard = sp.shard_batch({"input_ids": ids(), "labels": ids()})
    return {name: shard[name] for name in names}


def given(sp, **more):
    """A whole batch, but for what a row says."""
    return {"input_ids": ids(), "labels": ids(), **more}


def sharded(sp):
    return sp.shard_batch(given(sp))


AT = torch.arange(16)
# what is wrong -> (the batch, what every rank is told)
WRONG = {
    "other samples on one rank": (
        lambda sp: {"input_ids": ids(int(sp.rank == 1))}, "rank 1: input_ids", "DistributedSampler"
    ),
    "other lengths": (lambda sp: {"input_ids": ids()[:, : 16 - sp.rank]}, "rank 0: input_ids"),
    "labels on one rank": (lambda sp: {"input_ids": ids(), **({"labels": ids()} if sp.rank else {})}, "no labels"),
    "another divisor": (
        lambda sp: given(sp, num_items_in_batch=torch.tensor(7 + sp.rank)), "rank 1: num_items_in_batch 8.0"
    ),
    "parts without positions": (lambda sp: half(sp, "input_ids"), "parts of one sequence need all"),
    "parts without a placement": (lambda sp: half(sp, "input_ids", "position_ids"), "must count 0, 1, 2"),
    "parts with labels that are not shifted": (
        lambda sp: half(sp, "input_ids", "labels", "position_ids", "placement"), "no shift_labels"
    ),
    "whole ones with shifted labels": (lambda sp: given(sp, shift_labels=ids()), "position_ids; got none"),
    "positions that begin at 5": (lambda sp: given(sp, position_ids=AT[None] + 5), "got 5 at token 0 of row 0"),
    "positions that skip": (
        lambda sp: {"input_ids": ids(), "position_ids": (AT + 40 * (AT > 6))[None]}, "got 47 at token 7 of row 0"
    ),
    "positions of three axes": (lambda sp: given(sp, position_ids=AT.expand(3, 2, 16)), "got (3, 2, 16)"),
    "positions and other cumulative lengths": (
        lambda sp: {"input_ids": ids(), "position_ids": (AT % 8)[None], "cu_seqlens": torch.tensor([0, 16, 32])},
        "in cu_seqlens",
    ),
    "a mask that numbers documents": (
        lambda sp: given(sp, attention_mask=(AT // 8 + 1).expand(2, 16)), "got 2 at token 8 of row 0"
    ),
    "parts with such a mask": (
        lambda sp: {**sharded(sp), "attention_mask": torch.full((2, 8), 2), "placement": None}, "zeros or other numbers"
    ),
    "a cache": (lambda sp: given(sp, use_cache=True), "use_cache"),
    "full attention": (lambda sp: {"input_ids": ids(), "is_causal": False}, "is_causal=False"),
    "some logits and a loss": (lambda sp: given(sp, logits_to_keep=2), "logits_to_keep"),
    "a mask of four dims": (lambda sp: given(sp, attention_mask=torch.ones(2, 1, 16, 16)), "(2, 16)"),
    "padding between tokens": (
        lambda sp: {"input_ids": ids(), "attention_mask": (AT % 5 > 0).long().expand(2, -1)}, "zeros between ones"
    ),
    "a token that the model does not have": (lambda sp: {"input_ids": ids() + 40}, "from 0 to 63"),
    "a tensor of something else": (lambda sp: {"input_ids": ids(), "weights": torch.ones(3)}, "float32 (3,)"),
}  # fmt: skip


@on_each_of(2, keep="deepspeed")
def test_a_batch_that_no_whole_one_can_be():
    """After each a right one has a loss, for which ranks must be in step."""
    sp, wrong = make(**MODES["r2"]), {}
    model = small().patch_attention(sp)
    for name, (made, *words) in WRONG.items():
        batch = made(sp)
        sp.comm.received.clear()
        refused = refusal(model, **batch)
        if told_wrongly(refused, words) or sp.comm.received:
            wrong[name] = refused
        model(input_ids=ids(), labels=ids()).loss.backward()
    assert wrong == {}


def told_wrongly(refused, words, kinds=("InputError", "DisagreementError")):
    kind, message = refused
    return kind not in kinds or not is_one_sentence(message) or missing(message, *words)


@on_each_of(2, keep="deepspeed")
def test_a_loss_function_that_would_be_wrong():
    model = small().patch_attention(make(**MODES["r2"]))
    model.loss_function = local_mean  # of this rank's labels alone
    assert not told_wrongly(refusal(model, input_ids=ids(), labels=ids()), ["num_items_in_batch"], ["ConfigError"])
    assert model(input_ids=ids()).logits.float().mean().isfinite()


# --- looking at whole outputs

# what rank 1 does while rank 0 looks -> what the sentence calls it
ELSEWHERE = {
    "the next forward": (lambda sp, model, output: model(input_ids=ids()), "rank 1: whole batch"),
    "a sharded forward": (lambda sp, model, output: model(**sp.shard_batch({"labels": ids()})), "rank 1: batches"),
    "backward": (lambda sp, model, output: output.loss.backward(), "rank 1: backward through 'whole loss"),
    "backward of another output": (
        lambda sp, model, output: output.hidden_states[-1].local.sum().backward(), "through 'whole hidden_states"
    ),
    "another output": (lambda sp, model, output: str(output.hidden_states[0]), "rank 1: gather of whole hidden_states"),
    "a mean": (lambda sp, model, output: sp.mean_loss(output.loss), "rank 1: losses"),
}  # fmt: skip


@on_each_of(2, keep="deepspeed")
def test_a_rank_that_looks_alone_is_told():
    sp = make(**MODES["r2"])
    model = small().patch_attention(sp)
    for elsewhere, word in ELSEWHERE.values():
        output = model(input_ids=ids(), labels=ids(), output_hidden_states=True)
        call = (lambda output=output: f"{output.logits}") if sp.rank == 0 else lambda: elsewhere(sp, model, output)  # noqa: B023
        assert not told_wrongly(refusal(call), ["gather of whole logits, which all", word], ["DisagreementError"])
    assert model(input_ids=ids()).logits[0, 0, 0].isfinite()


# what one rank does in its second step -> (a word of another mistake's sentence, words of its own)
MISTAKES = {
    "a print": ("0 * out.sum()", "read it on all ranks", "rank 0: gather of whole logits"),
    "generate": ("0 * out.sum()", "call it on all ranks", "rank 0: arguments of generate"),
    "a skipped step": ("samples of its own", "is one call ahead"),
    "a skipped step of shards": ("samples of its own", "is one call ahead"),
    "a skipped backward": ("samples of its own", "rank 1 is one call ahead", "0 * out.sum()"),
}


@on_each_of(2, keep="deepspeed")
def test_the_first_mistakes_of_everybody_are_told_apart():
    def train(mistake):
        sp = make(**MODES["r2"])
        model = small(pad_token_id=0).patch_attention(sp)
        for number in range(3):
            here = mistake if number == 1 and sp.rank == ("skipped" in mistake) else ""
            if here.startswith("a skipped step"):
                continue
            batch = {"input_ids": ids(number), "labels": ids(number)}
            output = model(**(sp.shard_batch(batch) if "shards" in mistake else batch))
            if here == "a print":
                f"{output.logits.mean()}"
            if here == "generate":
                model.generate(ids()[:, :5], max_new_tokens=2)
            if here != "a skipped backward":
                output.loss.backward()

    for mistake, (unwanted, *words) in MISTAKES.items():
        refused = refusal(train, mistake)
        assert not told_wrongly(refused, words, ["DisagreementError"]), (mistake, refused)
        assert unwanted not in refused[1]


@pytest.mark.parametrize("checkpoints", each_then_rest([True], [None, False]))
@on_each_of(2, keep="deepspeed")
def test_losses_in_another_order_on_a_rank(checkpoints):
    """Whose losses are of logits, or come from a model with checkpoints and head chunks."""
    sp = make(**MODES["r2"], head_chunks=2)
    model = small().patch_attention(sp)
    if checkpoints is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpoints})
    batch = given(sp)
    for name, through in (("loss", "whole loss"), ("logits", "whole logits"), ("loss", "attention of layer 0")):
        batches = [sharded(sp) for _ in range(2)] if "attention" in through else [batch] * 2
        losses = [model(**one)[name].mean() for one in batches]
        refused = refusal(losses[sp.rank].backward)
        assert not told_wrongly(refused, ["come in another order", f"rank 0: '{through}"], ["DisagreementError"])


def nobody_comes():
    """What rank 0 raises, while rank 1 waits for it to have raised."""
    model = small().patch_attention(make(**MODES["r2"]))
    output, store = model(input_ids=ids()), dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["raised"])
        return ""
    with pytest.raises(CommunicationError) as raised:
        print(output.logits)
    store.set("raised", "1")
    return str(raised.value)


def test_a_rank_that_does_nothing_is_waited_for_no_longer_than_the_timeout():
    message, _ = on_ranks(2, nobody_comes, patience=2)
    assert missing(message, "gather of whole logits", "timed out after 2 s", "not only rank 0") == []


def alone():
    """What rank 0 says while it calls the model and rank 1 comes late; then what one rank cannot share."""
    waits.PATIENCE = 0.4
    model = small()
    share_sequences(model, size=2)
    rank = dist.get_rank()
    if rank == 1:
        time.sleep(1.2)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        model(input_ids=ids())
    told = {"": said.getvalue()}
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
        told["autocast"] = refusal(model, input_ids=ids())[1]
    told["settings"] = refusal(share_sequences, small(), **{"ulises" if rank else "ulysses": 2})[1]
    told["model"] = refusal(share_sequences, torch.nn.Linear(2, 2) if rank else small(), size=2)[1]
    own = small()
    if rank:
        own.forward = lambda **given: None
    told["tiles"] = refusal(share_sequences, own, size=2, loss_tiles=2)[1]
    return told, model(input_ids=ids()).logits[0, 0, 0].isfinite().item()


def test_a_rank_that_calls_the_model_or_shares_it_by_itself():
    waiting, late = on_ranks(2, alone)
    assert missing(waiting[0][""], "a forward of a model", "whole_sequences(model)", "for rank 1") == []
    assert late[0][""] == ""
    for told, in_step in (waiting, late):
        assert in_step
        assert missing(told["autocast"], "rank 1: autocast torch.bfloat16") == []
        assert missing(told["settings"], "ulises") == []
        assert missing(told["model"], "got Linear") == []
        assert missing(told["tiles"], "the forward of their class") == []
