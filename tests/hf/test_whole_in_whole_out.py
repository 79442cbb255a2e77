"""A patched model takes whole batches and gives whole outputs: those of the plain model, for any loss made of them."""

import pytest
import torch
from torch.nn import functional as F

from hf_integration import patch_attention
from tests.dist.ranks import make
from tests.hf.families import collated, gradients, real
from tests.hf.llama import IGNORE, averaged, gap, small, with_lora
from tests.launch import on_engine_ranks as on_ranks
from tests.live import Live

pytestmark = pytest.mark.usefixtures("compiled")
SECTIONS = {
    "r2": {"size": 2, "ulysses": 1},
    "u2": {"size": 2, "ulysses": 2},
    "u2r2": {"size": 4, "ulysses": 2},
    "r4": {"size": 4, "ulysses": 1, "layout": "zigzag"},
    "u4": {"size": 4, "ulysses": 4},
}
KINDS = ("odd", "packed", "left", "right")


def preference(output, batch):
    """DPO's, of the first row over the second: no sum over tokens."""
    logps = output.logits[:, :-1].log_softmax(-1)
    labels = batch["labels"][:, 1:]
    picked = torch.gather(logps, 2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    sums = (picked * (labels != IGNORE)).sum(-1)
    return -F.logsigmoid(0.1 * (sums[0] - sums[1]))


# --- a LLaMA, in fp64, called in other ways


def exact(**changes):
    return small(**changes).double()


def checkpointed():
    model = exact()
    model.gradient_checkpointing_enable()
    return model


def embedded(model, batch):
    rest = {name: x for name, x in batch.items() if name != "input_ids"}
    return model(inputs_embeds=model.get_input_embeddings()(batch["input_ids"]), **rest).loss


def last_logits(model, batch):
    rest = {name: x for name, x in batch.items() if name != "labels"}
    return (model(**rest, logits_to_keep=3).logits * real(batch)[:, -3:]).exp().mean()


def base(model, batch):
    rest = {name: x for name, x in batch.items() if name != "labels"}
    return (model.model(**rest).last_hidden_state * real(batch)).pow(2).mean((1, 2)).sqrt().sum()


def as_tuple(model, batch):
    loss, logits = model(**batch, return_dict=False)[:2]
    return loss * (logits * real(batch)).pow(2).mean().sqrt()


def counted(model, batch):
    """Positions as generation makes them of a mask: anything where padding is."""
    at = batch.get("position_ids", (real(batch)[..., 0].cumsum(1) - 1).masked_fill(real(batch)[..., 0] == 0, 1))
    return model(**{**batch, "position_ids": at}).loss


def one_row(model, batch):
    """Slices of rows and tokens, by slices and by numbers."""
    logits = model(**batch).logits
    return logits[1, 13:-22].pow(2).mean() * logits[:, 17, 5:].exp().mean()


def hidden(model, batch):
    """A ratio and a maximum of whole logits, and products of hidden states, of tokens that are no padding."""
    output = model(**batch, output_hidden_states=True)
    logits, *states = (x * real(batch) for x in (output.logits, *output.hidden_states))
    ratio = logits.float().pow(2).mean((1, 2)) / (1 + logits.amax((1, 2)).abs())
    return ratio.sum().sqrt() + sum(torch.einsum("bsd,btd->bst", x, x).mean().tanh() for x in states)


def with_fused_head():
    from trl.trainer.utils import add_fused_lm_head

    model = exact()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def scored(model, batch):
    """A preference by the log-probabilities of trl's fused head, and the entropy beside them."""
    output = model(**batch, fused_lm_head=True)
    counted = output.label_mask
    sums = (output.log_probs * counted).sum(-1)
    return -F.logsigmoid(sums[0] - sums[1]) + 0.1 * output.loss + output.entropy[counted].mean().detach()


# way -> (the model, its loss of a batch, changes of the configuration)
WAYS = {
    "by position": (exact, lambda model, batch: model(batch["input_ids"], labels=batch["labels"]).loss, {}),
    "divided": (exact, lambda model, batch: model(**batch, num_items_in_batch=torch.tensor(7)).loss, {}),
    "embeddings": (exact, embedded, {}),
    "the last logits": (exact, last_logits, {}),
    "the base model": (exact, base, {}),
    "as a tuple": (exact, as_tuple, {}),
    "positions": (exact, counted, {}),
    "slices": (exact, one_row, {}),
    "hidden states": (exact, hidden, {}),
    "adapters": (lambda: with_lora(exact(), "q_proj", "v_proj"), lambda model, batch: model(**batch).loss, {}),
    "checkpoints": (checkpointed, lambda model, batch: preference(model(**batch), batch), {}),
    "a fused head": (with_fused_head, scored, {}),
    "tiles": (exact, lambda model, batch: model(**batch).loss, {"mlp_tiles": 2, "loss_tiles": 3}),
}


def ways(section, kinds):
    """By way and kind of batch the errors of loss and gradients, beside the plain model."""
    found = {}
    for changes in ({}, {"mlp_tiles": 2, "loss_tiles": 3}):
        sp = make(**section, **changes)
        for way, (made, loss_of, its) in WAYS.items():
            for kind in kinds if its == changes else ():
                model, batch = made(), collated("odd" if way == "by position" else kind)
                batch["use_cache"] = False  # with one the plain model does not see documents
                wanted = loss_of(model, batch)
                wanted.backward()
                its_gradients = gradients(model)
                model.zero_grad()
                patch_attention(model, sp)
                loss = loss_of(model, batch)
                loss.backward()
                found[way, kind] = abs(loss.item() / wanted.item() - 1), gap(averaged(model), its_gradients)
    return found


@pytest.mark.parametrize(
    ("world", "section", "kinds"),
    [
        pytest.param(2, SECTIONS["r2"], ["packed"], id="r2"),
        pytest.param(4, SECTIONS["u2r2"], ["left"], id="u2r2"),
        *(
            pytest.param(section["size"], section, KINDS, id=f"{name}-whole", marks=pytest.mark.slow)
            for name, section in SECTIONS.items()
        ),
    ],
)
def test_other_ways_to_call_it(world, section, kinds):
    for found in on_ranks(world, ways, section, kinds, timeout=600):
        assert len(found) == len(WAYS) * len(kinds)
        for case, errors in found.items():
            assert max(errors) < 1e-6, (case, errors)  # transformers computes its loss in fp32


def costs(forwards):
    """By forward: elements that arrived, and what attention did, of a step that uses the loss alone."""
    sp = make(**SECTIONS["u2r2"])
    model, found = small().patch_attention(sp), {}
    for kind in KINDS:
        for name, batch in (("whole", collated(kind)), ("sharded", sp.shard_batch(collated(kind)))):
            if name not in forwards:
                continue
            sp.comm.received.clear()
            with torch.profiler.profile() as profile:
                model(**batch).loss.backward()
            events = sorted(profile.events(), key=lambda event: event.time_range.start)
            labels = [event.name for event in events if event.name.startswith("ds_seqpar ")]
            found[name, kind] = dict(sp.comm.received), [label for label in labels if " agree" not in label]
    return found


def test_a_step_by_its_loss_costs_what_a_sharded_one_costs():
    """The same elements, transfers and products, in the same order."""
    for found in on_ranks(4, costs, ("whole", "sharded")):
        for kind in KINDS:
            (received, labels), (its_received, its_labels) = found["whole", kind], found["sharded", kind]
            assert received == its_received
            assert labels == its_labels


def kept():
    """Bytes of tensors that are there after a forward, and at most in backward, of a whole and of a sharded batch; the
    bytes of whole ids."""
    sp = make(**SECTIONS["u2r2"])
    model, found = small().patch_attention(sp), {}
    ids = torch.randint(3, 64, (2, 512), generator=torch.Generator().manual_seed(1))
    for name in ("whole", "sharded") * 2:  # the first of each is a warm-up
        batch = {"input_ids": ids, "labels": ids.clone()}
        batch = batch if name == "whole" else sp.shard_batch(batch)
        model.zero_grad()
        with Live() as live:
            loss = model(**batch).loss
            after = live.settled()
            live.restart()
            loss.backward()
            found[name] = after, live.peak
    return found, ids.numel() * ids.element_size()


def test_a_step_by_its_loss_holds_whole_ids_and_labels_beside():
    """Logits of local tokens alone are four times the ids here."""
    for found, ids in on_ranks(4, kept):
        for whole, sharded in zip(found["whole"], found["sharded"], strict=True):
            assert whole - sharded <= 4 * ids, (whole, sharded, ids)
