"""Faults that are planted in one line, and the tests that find them: what a green run is worth.

Each kind is one that some implementation had, or that a change could easily bring: scales, edges of masks, products,
merges, heads, labels, counts, random numbers.
"""

import dataclasses
import json
from collections.abc import Callable

import pytest

from tests import attention_cases, grids, plants
from tests.dist import (
    test_batch_refusals,
    test_cached_attention,
    test_contract,
    test_loaders,
    test_packs,
    test_recurrence,
    test_transport,
    test_whole_tensors,
)
from tests.grids import each_then_rest
from tests.hf import test_conformance, test_noise, test_shared_prompts, test_trainer_evaluation
from tests.launch import RankFailure, on_ranks
from tests.unit import test_common_part, test_exact

pytestmark = pytest.mark.usefixtures("compiled")
CORE, COMPILER, DATA = "ds_seqpar.core.runtime.", "ds_seqpar.core.compiler.", "ds_seqpar.data."


@dataclasses.dataclass(frozen=True)
class Fault:
    """where: module:function; right, wrong: the line's text before and after; found: a test, of a folder; kind: of what
    it raises."""

    where: str
    right: str
    wrong: str
    found: Callable
    kind: str = "AssertionError"


def drawn(schedule):
    """Cases on virtual ranks, all of them on one rank, on which the fault is."""
    for case in attention_cases.draws(schedule, 9, 60, 60):
        with pytest.MonkeyPatch.context() as patch:
            attention_cases.check(case, patch)


def exact(schedule="ring"):
    return lambda folder: on_ranks(1, drawn, schedule)


def in_bf16(name):
    test_exact.test_bf16_is_as_exact_as_one_kernel_call_over_the_whole_sequence(name)


def on_each(test, **arguments):
    """A test that every rank runs."""
    return lambda folder: test(**arguments)


def contract(number):
    case = test_contract.FEW[number]
    return lambda folder: test_contract.test_gradients_loss_and_norm_are_those_of_one_process([case])


def dealt(*kinds):
    return lambda folder: test_loaders.test_an_epoch_is_dealt_to_groups_and_goes_on_where_it_was_left([*kinds], False)


SAVING = on_each(test_conformance.test_models_that_share_sequences_are_the_plain_ones, ranks=2, group="saving")
PACKED = on_each(test_packs.test_packed_rows_are_placed_and_attention_over_them_is_exact)
CACHED = on_each(test_cached_attention.test_every_rank_gets_dense_attention, size=2, ulysses=1)
STATES = on_each(
    test_recurrence.test_layers_equal_each_document_alone, ranks=2, cases=grids.cover(**test_recurrence.AXES)
)
FAULTS = {
    # --- scores and masks
    "a scale off by a percent": Fault(CORE + "dense:Forward.product", "self.scale", "1.01 * self.scale", exact()),
    "gradients without the scale": Fault(CORE + "kernels.reference:gradients", "- delta) * scale", "- delta)", exact()),
    "a softcap without its derivative": Fault(
        CORE + "kernels.reference:gradients", "if softcap:", "if False:", exact()
    ),
    "the key after a query": Fault(CORE + "kernels.reference:_scores", "tril(first)", "tril(first + 1)", exact()),
    "a window of one key more": Fault(COMPILER + "tiles.tiles:_append", "1 - mask.window)", "-mask.window)", exact()),
    "documents that see the token before them": Fault(
        COMPILER + "sharding.masks:Mask.own", "Level(starts,", "Level(tuple(max(0, x - 1) for x in starts),", exact()
    ),
    # --- products and what becomes of them
    "a product twice": Fault(
        CORE + "kernels.accumulate:forward", "in launches:", "in (*launches, *launches[-1:]):", exact()
    ),
    "a product left out of backward": Fault(
        CORE + "kernels.accumulate:backward", "in launches:", "in launches[1:]:", exact()
    ),
    "a merge that keeps the greater lse": Fault(
        CORE + "kernels.accumulate:_merge_", "torch.logaddexp(", "torch.maximum(", exact()
    ),
    "a slot whose out is that of the block before": Fault(
        CORE + "dense:Backward.forget", "self.out_of_slot.pop(slot, None)", "slot",
        lambda folder: on_ranks(1, in_bf16, "ring, q travels"),
    ),
    "sums in bf16": Fault(
        CORE + "kernels.accumulate:_merge_", "(lse, new_lse))\n", "(lse, new_lse)); out.copy_(out.bfloat16())\n",
        lambda folder: on_ranks(1, in_bf16, "ring"),
    ),
    "a transfer that nobody waits for": Fault(
        CORE + "walk:Walk.wait", "self.tickets[instruction.ticket].wait()", "instruction",
        lambda folder: test_transport.test_real_ranks_have_the_bits_and_counts_of_virtual_ones(3),
    ),
    "sinks whose gradient has the wrong sign": Fault(
        CORE + "call:BackwardCall.enter", ".sum((0, 1)).neg_()", ".sum((0, 1))", exact()
    ),
    "a common part that gradients of q lack": Fault(
        CORE + "call:BackwardCall.leave", "if self.sinks is not None and self.common is not None", "if False",
        lambda folder: on_ranks(1, test_common_part.test_a_sink_keeps_its_weight),
    ),
    "a latent's matrix with the gradient of one product": Fault(
        "ds_seqpar.operators.latent:LatentBackward.product", "self.dmatrix +=", "self.dmatrix =", exact(),
    ),
    # --- heads
    "heads from the wrong end": Fault(
        CORE + "buffers:pack_in", "source.unsqueeze(1)", "source.flip(0).unsqueeze(1)", exact()
    ),
    "sinks from the wrong end": Fault(CORE + "call:Call.of_inner_heads", "return x[", "return x.flip(0)[", exact()),
    "shared heads with the gradient of one rank": Fault(
        CORE + "buffers:unpack_out", "source.sum(1, dtype=sums)", "source[:, 0]", exact()
    ),
    # --- batches and losses
    "a loss times the groups": Fault(
        DATA + "batches:shard_microbatches", "(sp.size * sp.data_size * len(", "(sp.size * len(", contract(0)
    ),
    "a loss times the micro-steps": Fault(
        DATA + "batches:shard_microbatches", "sp.data_size * len(microbatches)", "sp.data_size", contract(0)
    ),
    "labels across a document's end": Fault(
        DATA + "part:Part.shifted", "self.segments or (self.seq,) * self.rows", "(self.seq,) * self.rows", PACKED
    ),
    "labels of the token before": Fault(DATA + "part:Part.shifted", "x.roll(-1, dim)", "x.roll(1, dim)", PACKED),
    "positions that go on over documents": Fault(
        DATA + "batch_layout:BatchLayout._counted_from", "else self.restarts", "else (0,)", PACKED
    ),
    "padding that counts as tokens": Fault(
        DATA + "batches:_padding_as_documents", "*edges, ", "",
        on_each(test_packs.test_padding_on_either_side_is_seen_by_nobody), kind="InputError",
    ),
    "completions whose positions begin anew": Fault(
        DATA + "batch_layout:BatchLayout._counted_from", "self.mask.documents, self.mask.origins",
        "self.mask.documents, self.mask.documents",
        on_each(test_shared_prompts.test_logits_and_gradients_are_those_of_rows_that_repeat_the_prompts),
    ),
    "a whole output's gradient without its factor": Fault(
        "ds_seqpar.whole.tensor:_FromShard.backward", " * ctx.shard_spec.sp.size", "",
        on_each(test_whole_tensors.test_a_use_gives_what_the_whole_gives_and_its_gradient),
    ),
    "another rank's batch that nobody compares": Fault(
        DATA + "batches:fingerprint", "in sorted(batch.items())", "in ()",
        on_each(test_batch_refusals.test_batches, name="one group"),
    ),
    # --- kept keys, states
    "a sink on every rank": Fault("ds_seqpar.operators.decode:decode", "runtime.rank == 0", "True", CACHED),
    "parts merged without weights": Fault(
        "ds_seqpar.operators.decode:_merged", "lses.softmax(0)", "torch.full_like(lses, 1 / len(lses))", CACHED
    ),
    "a state of one run too few": Fault(
        "ds_seqpar.operators.states:_at_once", "number - step * reach", "number - step * (reach - 1)", STATES
    ),
    "a state that enters the next document": Fault(
        "ds_seqpar.operators.segments:segments_of", "documents or (0,)", "(0,)", STATES
    ),
    "a convolution with the first tokens before it": Fault(
        "ds_seqpar.operators.recurrence:_tails", "piece[:, segment.length - kept :]", "piece[:, :kept]", STATES
    ),
    "a state's gradient by the map itself": Fault(
        "ds_seqpar.operators.states:Entering.backward", "grad, maps.mT", "grad, maps", STATES
    ),
    # --- memory
    "tiles that replace one another's gradients": Fault(
        "hf_integration.memory.tiled_function:GradientSums.add", "total.add_(", "total.copy_(", SAVING
    ),
    "a tiled loss without the gradient that reaches it": Fault(
        "hf_integration.memory.tiled_function:_Summed.backward", "sums.pop_all(grad)", "sums.pop_all()", SAVING
    ),
    # --- random numbers, data, the Trainer
    "ranks that draw the same noise": Fault(
        "hf_integration.noise:own_stream", "sp.data_rank, sp.rank", "sp.data_rank, 0",
        on_each(test_noise.test_losses_and_gradients_are_those_of_a_model_with_the_numbers_that_ranks_drew),
    ),
    "a resumed run without its random state": Fault(
        "hf_integration.trainer.trainer:SequenceParallelMixin._load_rng_state",
        "super()._load_rng_state(checkpoint)", "super()",
        test_noise.test_a_resumed_trainer_draws_what_it_would_have_drawn,
    ),
    "groups that read the same batches": Fault(
        DATA + "loader:Loader.dealt", "self.groups, self.sp.data_rank", "self.groups, 0", dealt("shuffled")
    ),
    "an epoch that goes on a batch late": Fault(
        DATA + "loader:Loader._batches_from", 'state["random"], state["batches"]',
        'state["random"], state["batches"] + 1', dealt("shuffled"),
    ),
    "evaluation that counts a repeated example": Fault(
        "hf_integration.trainer.evaluation:Evaluation._unrepeated_labels", ">= real", "> real",
        lambda folder: test_trainer_evaluation.test_a_prediction_step_of_ones_own_gives_the_mean_token_loss(
            4, 2, folder
        ),
    ),
}  # fmt: skip
QUICK = ["a window of one key more", "heads from the wrong end", "a sink on every rank"]


@pytest.mark.parametrize("name", each_then_rest(QUICK, [name for name in FAULTS if name not in QUICK]))
def test_a_planted_fault_is_found(name, monkeypatch, tmp_path):
    """By what the test asserts, and by no error of the planted line; a rank may wait for one that failed."""
    fault = FAULTS[name]
    monkeypatch.setenv(plants.PLANTED, json.dumps([fault.where, fault.right, fault.wrong]))
    with pytest.raises(AssertionError) as caught:
        fault.found(tmp_path)
    if isinstance(caught.value, RankFailure):
        kinds = {kind for kind, *_ in caught.value.errors.values()} - {"CommunicationError"}
        assert kinds == {fault.kind}, str(caught.value)
