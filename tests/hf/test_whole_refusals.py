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
from tests.launch import on_engine_ranks, on_ranks
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")


def ids(seed=0):
    return torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(seed))


def half(sp, *names):
    """A sharded batch with these of its parts alone."""
    shard = sp.shard_batch({"input_ids": ids(), "labels": ids()})
    return {name: shard[name] for name in names}


# what is wrong -> (the batch, words that every rank is told)
WRONG = {
    "other samples on one rank": (
        lambda sp: {"input_ids": ids(int(sp.rank == 1))},
        ["same whole batch", "rank 1: input_ids", "DistributedSampler", "whole_sequences(model)"],
    ),
    "other lengths": (lambda sp: {"input_ids": ids()[:, : 16 - sp.rank]}, ["same whole batch", "rank 0: input_ids"]),
    "labels on one rank": (
        lambda sp: {"input_ids": ids(), **({"labels": ids()} if sp.rank else {})},
        ["same whole batch", "rank 0: no labels"],
    ),
    "another divisor": (
        lambda sp: {"input_ids": ids(), "labels": ids(), "num_items_in_batch": torch.tensor(7 + sp.rank)},
        ["same whole batch", "rank 1: num_items_in_batch 8.0"],
    ),
    "parts without positions": (
        lambda sp: half(sp, "input_ids"),
        ["same whole batch", "parts of one sequence need all that sp.shard_batches"],
    ),
    "parts without a placement": (
        lambda sp: half(sp, "input_ids", "position_ids"),
        ["must count 0, 1, 2", "all that sp.shard_batches returns"],
    ),
    "parts with labels that are not shifted": (
        lambda sp: half(sp, "input_ids", "labels", "position_ids", "placement"),
        ["looks sharded", "no shift_labels", "or a whole batch"],
    ),
    "whole ones with shifted labels": (
        lambda sp: {"input_ids": ids(), "labels": ids(), "shift_labels": ids()},
        ["looks sharded", "position_ids; got none", "or a whole batch"],
    ),
    "whole ones with positions that begin at 5": (
        lambda sp: {"input_ids": ids(), "labels": ids(), "position_ids": torch.arange(5, 21)[None]},
        ["must count 0, 1, 2", "got 5 at token 0 of row 0", "all that sp.shard_batches returns"],
    ),
    "whole ones with positions that skip": (
        lambda sp: {"input_ids": ids(), "position_ids": (torch.arange(16) + 40 * (torch.arange(16) > 6))[None]},
        ["without skips (PoSE)", "got 47 at token 7 of row 0"],
    ),
    "whole ones with positions of three axes": (
        lambda sp: {"input_ids": ids(), "labels": ids(), "position_ids": torch.arange(16).expand(3, 2, 16)},
        ["position_ids must be of shape (2, 16)", "got (3, 2, 16)"],
    ),
    "whole ones with positions and other cumulative lengths": (
        lambda sp: {
            "input_ids": ids(),
            "position_ids": (torch.arange(16) % 8)[None],
            "cu_seqlens": torch.tensor([0, 16, 32]),
        },
        ["documents must be the same in all that says where they are", "in cu_seqlens"],
    ),
    "a mask that numbers documents": (
        lambda sp: {"input_ids": ids(), "labels": ids(), "attention_mask": (torch.arange(16) // 8 + 1).expand(2, 16)},
        ["attention_mask must be 0 for padding and 1", "got 2 at token 8 of row 0", "seq_idx"],
    ),
    "parts with a mask that numbers documents": (
        lambda sp: (
            sp.shard_batch({"input_ids": ids(), "labels": ids()})
            | {"attention_mask": torch.full((2, 8), 2), "placement": None}
        ),
        ["got one with zeros or other numbers"],
    ),
    "a cache": (lambda sp: {"input_ids": ids(), "labels": ids(), "use_cache": True}, ["no kv cache", "use_cache"]),
    "full attention": (lambda sp: {"input_ids": ids(), "is_causal": False}, ["is_causal=False"]),
    "some logits and a loss": (
        lambda sp: {"input_ids": ids(), "labels": ids(), "logits_to_keep": 2},
        ["logits_to_keep", "leave one of them out"],
    ),
    "a mask of four dims": (
        lambda sp: {"input_ids": ids(), "attention_mask": torch.ones(2, 1, 16, 16)},
        ["attention_mask", "(2, 16)"],
    ),
    "padding between tokens": (
        lambda sp: {"input_ids": ids(), "attention_mask": (torch.arange(16) % 5 > 0).long().expand(2, -1)},
        ["zeros between ones", "position_ids that begin again at 0", "seq_idx", "-100"],
    ),
    "a token that the model does not have": (
        lambda sp: {"input_ids": ids() + 40},
        ["input_ids must be from 0 to 63", "at token"],
    ),
    "a tensor of something else": (
        lambda sp: {"input_ids": ids(), "weights": torch.ones(3)},
        ["got weights float32 (3,)", "'weights': tokens()"],
    ),
}


def wrong_calls(names):
    """What a forward says, by name; then a right one, for which ranks must be in step."""
    sp, found = make(**MODES["r2"]), {}
    model = small().patch_attention(sp)
    for name in names:
        batch = WRONG[name][0](sp)
        sp.comm.received.clear()
        found[name] = (*refusal(model, **batch), bool(sp.comm.received))
        model(input_ids=ids(), labels=ids()).loss.backward()
    return found


def test_a_batch_that_no_whole_one_can_be():
    for found in on_engine_ranks(2, wrong_calls, list(WRONG)):
        for name, (_, words) in WRONG.items():
            kind, message, sent = found[name]
            assert kind in ("InputError", "DisagreementError"), name
            assert is_one_sentence(message), message
            assert missing(message, *words) == [], (name, message)
            assert not sent


def with_own_loss():
    model = small().patch_attention(make(**MODES["r2"]))
    model.loss_function = local_mean  # of this rank's labels alone
    said = refusal(model, input_ids=ids(), labels=ids())
    return *said, model(input_ids=ids()).logits.float().mean().isfinite().item()


def test_a_loss_function_that_would_be_wrong():
    for kind, message, other in on_engine_ranks(2, with_own_loss):
        assert kind == "ConfigError"
        assert missing(message, "num_items_in_batch", "loss_function that", "from the whole logits") == []
        assert other


# --- looking at whole outputs

# what rank 1 does while rank 0 looks -> what the sentence calls it
ELSEWHERE = {
    "the next forward": (lambda sp, model, output: model(input_ids=ids()), "rank 1: whole batch"),
    "a sharded forward": (lambda sp, model, output: model(**sp.shard_batch({"labels": ids()})), "rank 1: batches"),
    "backward": (
        lambda sp, model, output: output.loss.backward(),
        "rank 1: backward through 'whole loss",
    ),
    "backward of another output": (
        lambda sp, model, output: output.hidden_states[-1].local.sum().backward(),
        "rank 1: backward through 'whole hidden_states",
    ),
    "another output": (lambda sp, model, output: str(output.hidden_states[0]), "rank 1: gather of whole hidden_states"),
    "a mean": (lambda sp, model, output: sp.mean_loss(output.loss), "rank 1: losses"),
}


def looked_at_alone():
    sp, found = make(**MODES["r2"]), []
    model = small().patch_attention(sp)
    for elsewhere, _ in ELSEWHERE.values():
        output = model(input_ids=ids(), labels=ids(), output_hidden_states=True)
        if sp.rank == 0:
            found.append(refusal(lambda output=output: f"{output.logits}"))
        else:
            found.append(refusal(elsewhere, sp, model, output))
    return found, model(input_ids=ids()).logits[0, 0, 0].isfinite().item()


# what one rank does in its second step -> (words of the sentence, words of another mistake's)
MISTAKES = {
    "a print": (["read it on all ranks", "rank 0: gather of whole logits"], "0 * out.sum()"),
    "generate": (["call it on all ranks", "whole_sequences(model)", "rank 0: arguments of generate"], "0 * out.sum()"),
    "a skipped step": (["is one call ahead", "on all or on none"], "samples of its own"),
    "a skipped step of shards": (["same batches", "is one call ahead", "on all or on none"], "samples of its own"),
    "a skipped backward": (["rank 1 is one call ahead", "0 * out.sum()"], "samples of its own"),
}


def first_mistakes():
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

    return {mistake: refusal(train, mistake) for mistake in MISTAKES}


def test_the_first_mistakes_of_everybody_are_told_apart():
    for found in on_engine_ranks(2, first_mistakes):
        for mistake, (words, unwanted) in MISTAKES.items():
            kind, message = found[mistake]
            assert kind == "DisagreementError", mistake
            assert is_one_sentence(message), message
            assert missing(message, *words) == [], message
            assert unwanted not in message, message


def losses_in_another_order(checkpoints):
    """What ranks say whose losses are of logits, or come from a model with checkpoints and head chunks."""
    sp = make(**MODES["r2"], head_chunks=2)
    model = small().patch_attention(sp)
    if checkpoints is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpoints})
    found = []
    for name in ("loss", "logits"):
        outputs = [model(input_ids=ids(), labels=ids())[name].mean() for _ in range(2)]
        found.append(refusal(outputs[sp.rank].backward))
    shards = [sp.shard_batch({"input_ids": ids(), "labels": ids()}) for _ in range(2)]
    losses = [model(**shard).loss for shard in shards]
    return [*found, refusal(losses[sp.rank].backward)]


@pytest.mark.parametrize("checkpoints", each_then_rest([True], [None, False]))
def test_losses_in_another_order_on_a_rank(checkpoints):
    for found in on_engine_ranks(2, losses_in_another_order, checkpoints):
        for (kind, message), name in zip(found, ("whole loss", "whole logits", "attention of layer 0"), strict=True):
            assert kind == "DisagreementError"
            assert (
                missing(message, "the same backward", "come in another order", f"rank 0: '{name}", "the last call")
                == []
            )
            assert is_one_sentence(message)


def test_a_rank_that_looks_alone_is_told():
    for found, in_step in on_engine_ranks(2, looked_at_alone):
        assert in_step
        for (_, words), (kind, message) in zip(ELSEWHERE.values(), found, strict=True):
            assert kind == "DisagreementError"
            assert (
                missing(message, "the same calls", "gather of whole logits, which all ranks must make", words) == []
            ), message
            assert is_one_sentence(message)


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
