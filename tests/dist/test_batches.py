"""shard_batches: labels are shifted before they are sharded, positions are global, and the divisor gives the mean."""

import pytest
import torch
import torch.distributed as dist

from ds_seqpar.data import inputs
from ds_seqpar.data.batch_layout import EQUAL
from tests.dist.ranks import make
from tests.launch import on_each_of
from tests.launch import on_warm_ranks as on_ranks

IGNORE = -100
WORLD, SEQ = 4, 48
LAYOUTS = ("contiguous", "striped", "zigzag")
EXTRA = torch.arange(2 * SEQ * 3).view(2, SEQ, 3).bfloat16()  # a tensor that has more dims than labels


def a_batch(seed, ignored=0.4, rows=2):
    """Token ids that say where they stand, and labels of which a share does not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = 1000 * seed + torch.arange(rows * SEQ).view(rows, SEQ)
    labels = torch.where(torch.rand(rows, SEQ, generator=generator) < ignored, IGNORE, ids)
    return {"input_ids": ids, "labels": labels}


def shifted(labels):
    """The label that each token predicts: that of the token to its right."""
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORE)], dim=1)


# deepspeed#5419 and #7473: ranks' losses differed, labels and position ids were suspected; deepspeed#7458: not sharded
@pytest.mark.parametrize("ulysses_size", [1, 2, 4])
@on_each_of(WORLD)
def test_shards_put_together_are_the_batch(ulysses_size):
    """In every layout; what came in is left as it was."""
    whole = a_batch(0)
    expected = {**whole, "shift_labels": shifted(whole["labels"]), "extra": EXTRA}
    for layout in LAYOUTS:
        sp = make(ulysses=ulysses_size, layout=layout)
        given = {**whole, "extra": EXTRA, "position_ids": torch.arange(SEQ)[None], "names": ["a", "b"]}
        given |= {"epoch": torch.tensor(3), "weights": torch.tensor([0.5, 2.0])}  # of the batch; of each row
        shard = sp.shard_batch(given, inputs={"extra": inputs.tokens(), "weights": inputs.row()})
        assert set(given) == {"input_ids", "labels", "extra", "position_ids", "names", "epoch", "weights"}
        assert all(torch.equal(whole[name], x) for name, x in a_batch(0).items())
        places = shard["position_ids"]
        assert torch.equal(places, places[:1].expand(2, SEQ // WORLD))
        order = torch.cat(gathered(places[0]))
        assert sorted(order.tolist()) == list(range(SEQ))
        for name, x in expected.items():
            assert torch.equal(torch.cat(gathered(shard[name]), dim=1), x[:, order]), (layout, name)
        assert shard["names"] == ["a", "b"]
        assert all(shard[name] is given[name] for name in ("epoch", "weights"))
        assert set(shard) == {*expected, "names", "epoch", "weights", "position_ids", "num_items_in_batch", "placement"}
        assert shard["placement"] is EQUAL


def gathered(x):
    """Those of all ranks."""
    found = [None] * WORLD
    dist.all_gather_object(found, x)
    return found


# shifted after sharding, the last token of every shard would predict nothing, or its own shard's first
@on_each_of(WORLD)
def test_a_shards_last_token_predicts_the_next_shards_first():
    sp, ids = make(layout="contiguous"), torch.arange(SEQ)[None]
    shard = sp.shard_batch({"input_ids": ids, "labels": ids})
    firsts = [*(int(x[0, 0]) for x in gathered(shard["input_ids"])), IGNORE]
    assert shard["shift_labels"][0, -1] == firsts[sp.rank + 1]


# layout, and of each micro-batch of a window: its seed, and the share of its labels that do not count
SETTINGS = [(layout, window) for layout in LAYOUTS for window in ([(1, 0.4)], [(1, 0.1), (2, 0.9), (3, 0.5)])]


def token_loss(labels):
    """A loss for every token, from its label alone; nothing for those that do not count."""
    return torch.where(labels == IGNORE, 0.0, (labels.double() + 1).log())


def attend(sp, batches):
    """What a model does beside its loss: it attends to all ranks' tokens, and reads positions."""
    x = torch.zeros(1, 2 * sp.multiple // sp.size, 1, 8)
    sp.attention(x, x, x)
    for batch in batches:
        batch["position_ids"].max()


def windows(size):
    """By layout and window: (num_items_in_batch by batch, this rank's label tokens, loss)."""
    found = []
    for layout, window in SETTINGS:
        sp = make(size=size, layout=layout)
        batches = sp.shard_batches([a_batch(10 * sp.data_rank + seed, ignored) for seed, ignored in window])
        attend(sp, batches)
        # as a transformers model does: the sum over its own tokens, divided by the number it is given
        losses = [token_loss(batch["shift_labels"]).sum() / batch["num_items_in_batch"] for batch in batches]
        tokens = sum(int((batch["shift_labels"] != IGNORE).sum()) for batch in batches)
        found.append(([batch["num_items_in_batch"] for batch in batches], tokens, sp.mean_loss(losses)))
    return found


def all_labels(size, window):
    """The shifted labels of every group's window, flat."""
    found = []
    for group in range(WORLD // size):
        found += [shifted(a_batch(10 * group + seed, ignored)["labels"]).flatten() for seed, ignored in window]
    return torch.cat(found)


# Megatron#7513 and #673: unequal masks halved or quartered gradients; verl#2857 and 360-LLaMA-Factory#1: accumulation
# gave another loss; transformers#46775 and 360-LLaMA-Factory#72: losses came out sp times too large
@pytest.mark.parametrize("size", [1, 2, 4])
def test_divisor_makes_the_mean_over_all_label_tokens(size):
    by_setting = zip(*on_ranks(WORLD, windows, size), strict=True)
    for (_, window), results in zip(SETTINGS, by_setting, strict=True):
        labels = all_labels(size, window)
        count = int((labels != IGNORE).sum())
        assert sum(tokens for _, tokens, _ in results) == count
        for items, _, loss in results:
            assert items == [count / (WORLD * len(window))] * len(window)
            assert loss == pytest.approx(token_loss(labels).sum().item() / count, rel=1e-12)


def ignored_tokens(which):
    """(num_items_in_batch, this rank's label tokens, its loss, mean loss): labels that do not count, on a contiguous
    layout, so that they are one rank's or all ranks'."""
    sp = make(layout="contiguous")
    ids = torch.arange(SEQ)[None]
    labels = ids.clone()
    labels[:, which] = IGNORE
    batch = sp.shard_batch({"input_ids": ids, "labels": labels})
    attend(sp, [batch])
    loss = token_loss(batch["shift_labels"]).sum() / batch["num_items_in_batch"]
    return batch["num_items_in_batch"], int((batch["shift_labels"] != IGNORE).sum()), loss.item(), sp.mean_loss(loss)


# Megatron#1764, axolotl#3026, ms-swift#2870: NaN where all tokens of a rank, or of a batch, were masked
def test_a_shard_without_labels_contributes_nothing():
    # the labels that rank 1's tokens predict: those of the tokens one to the right
    results = on_ranks(WORLD, ignored_tokens, slice(SEQ // WORLD + 1, 2 * SEQ // WORLD + 1))
    counts = [tokens for _, tokens, _, _ in results]
    assert counts == [12, 0, 12, 11]
    assert [items for items, *_ in results] == [sum(counts) / WORLD] * WORLD
    assert results[1][2] == 0.0
    assert all(loss > 0 for rank, (_, _, loss, _) in enumerate(results) if rank != 1)


def test_no_labels_at_all_give_no_loss_and_no_nan():
    for items, tokens, loss, mean in on_ranks(WORLD, ignored_tokens, slice(None)):
        assert items > 0
        assert tokens == 0
        assert (loss, mean) == (0.0, 0.0)


@on_each_of(WORLD)
def test_a_first_tokens_label_is_predicted_by_nobody():
    """No token stands to its left."""
    labels = torch.full((1, SEQ), IGNORE)
    labels[0, 0] = 7
    assert (make().shard_batch({"labels": labels})["shift_labels"] == IGNORE).all()


# transformers#48167: eval_loss came out cp times too large
@on_each_of(WORLD)
def test_evaluation_takes_one_batch_of_a_window():
    labels = torch.cat([shifted(a_batch(group)["labels"]) for group in (0, 1)])
    sp = make(size=2)
    sp.accumulation_steps = 2
    sharded = sp.shard_batch(a_batch(sp.data_rank), training=False)
    attend(sp, [sharded])
    loss = sp.mean_loss(token_loss(sharded["shift_labels"]).sum() / sharded["num_items_in_batch"])
    assert loss == pytest.approx(token_loss(labels).sum().item() / int((labels != IGNORE).sum()), rel=1e-12)
    assert sp.accumulation_steps == 2


PADDED = {
    "left": [(5, 16), (0, 16)],
    "right": [(0, 11), (0, 16)],
    "both": [(2, 9), (4, 16)],
    "a row": [(0, 16), (0, 0)],
}
FILLED = {
    "1, as transformers has it": lambda counted, real: counted.masked_fill(~real, 1),
    "0": lambda counted, real: counted.masked_fill(~real, 0),
    "what a sum gives": lambda counted, real: counted,
    "anything": lambda counted, real: torch.where(real, counted, torch.arange(16) * 7 % 5),
}


def padded(sp, real, positions):
    """What a rank holds, and the documents, of a batch with these position_ids."""
    ids = torch.arange(32).view(2, 16) + 1
    batch = {"input_ids": ids, "labels": ids.masked_fill(~real, IGNORE), "attention_mask": real.long()}
    found = sp.shard_batch({**batch, **({} if positions is None else {"position_ids": positions})})
    kept = ["input_ids", "shift_labels", "position_ids"]
    return [found[name].tolist() for name in kept], getattr(found.get("placement"), "mask", None)


@on_each_of(2)
def test_positions_on_padding_may_be_anything():
    sp, at = make(ulysses=1), torch.arange(16)
    for rows in PADDED.values():
        real = torch.stack([(at >= first) & (at < end) for first, end in rows])
        first, *others = (padded(sp, real, fill(real.cumsum(1) - 1, real)) for fill in FILLED.values())
        assert all(other == first for other in others), (first, others)
        assert first[1] is None or len(first[1].documents) <= 5  # padding is a document, not one a token
        assert padded(sp, real, at[None]) == padded(sp, real, None)


@on_each_of(4)
def test_positions_of_a_placement_begin_again_with_each_document():
    sp, lengths = make(ulysses=2), (5, 1, 17, 9)
    placement = sp.place(sum(lengths), lengths)
    whole = torch.cat([torch.arange(length) for length in lengths])
    assert torch.equal(sp.position_ids(sum(lengths), placement), sp.shard(whole, 0, placement))
    assert len(placement.position_ids(2, 0)) == 8
