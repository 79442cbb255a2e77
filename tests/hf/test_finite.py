"""`check_finite` in a model: what comes in, and what a module, the loss or an optimizer step makes, is named."""

import math

import pytest
import torch
import torch.distributed as dist
from deepspeed import comm
from transformers import TrainerCallback

import ds_seqpar
from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.base.compat import tree_leaves
from hf_integration import SequenceParallelTrainer, share_sequences
from tests.dist.ranks import is_one_sentence, refusal
from tests.dist.test_contract import ScheduleOptions
from tests.hf.llama import MODES, adam, ragged, settings, small
from tests.hf.trainers import arguments, collate, documents
from tests.launch import on_engine_ranks, on_trainer_ranks
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
WORLD, BAD = 2, 1
SECTION = {**MODES["r2"], "check_finite": True}
REDUCTIONS = ("all_reduce", "reduce_scatter_fn")  # by which ZeRO sums gradients


def spoil(x, value=math.nan):
    with torch.no_grad():
        x.view(-1)[:1] = value


def weight(engine, number):
    if number == 1 and dist.get_rank() == BAD:
        spoil(engine.module.model.layers[0].mlp.down_proj.weight)


def embedding(engine, number):
    if number == 1 and dist.get_rank() == BAD:
        engine.module.model.embed_tokens.weight.data.fill_(math.inf)


def scale(engine, number):
    if number == 1:
        engine.module.model.layers[0].self_attn.scaling = math.inf


def module(engine, number):
    if number == 1 and dist.get_rank() == BAD:
        engine.module.model.layers[0].mlp.act_fn.register_forward_hook(lambda *args: args[-1] * math.inf)


def gradient(engine, number):
    if number == 1 and dist.get_rank() == BAD:
        mlp = engine.module.model.layers[0].mlp
        mlp.register_full_backward_hook(lambda module, given, _: tuple(x * math.nan for x in given))


def nothing(engine, number):
    pass


def own_gradient(engine, number):
    """Of a parameter, on one rank; the hook is older than those of `check_finite`."""
    engine.module.model.norm.weight.spoils = number == 1 and dist.get_rank() == BAD


def hook(engine, number):
    """Of a parameter, on one rank, younger than those of `check_finite`: its gradient reaches others in ZeRO's sum."""
    if number == 1 and dist.get_rank() == BAD:
        engine.module.model.norm.weight.register_hook(lambda x: x * math.nan)


def clipping(engine, number):
    """A gradient is changed between backward and step, on one rank."""
    step = engine.step

    def clips():
        if engine.is_gradient_accumulation_boundary():
            spoil(tree_leaves(engine.optimizer.averaged_gradients)[0])
        step()

    if number == 1 and dist.get_rank() == BAD:
        engine.step = clips


def optimizer_hook(engine, number):
    def spoils(optimizer, *_):
        for group in optimizer.param_groups:
            spoil(group["params"][0].grad)

    if number == 1:
        engine.basic_optimizer.register_step_pre_hook(spoils)


def loss(engine, number):
    if number == 1 and dist.get_rank() == BAD:
        real = engine.module.loss_function
        engine.module.loss_function = lambda *args, **kwargs: real(*args, **kwargs) * math.nan


def loss_outside(engine, number):
    return (lambda x: x * math.nan) if number == 1 and dist.get_rank() == BAD else None


def state(engine, number):
    if number == 1:
        for state in engine.basic_optimizer.state.values():
            spoil(state["exp_avg"])


def rate(engine, number):
    if number == 1:
        for group in engine.basic_optimizer.param_groups:
            group["lr"] = math.inf


def norm(engine, number):
    if number == 1 and dist.get_rank() == BAD:
        real = engine.get_global_grad_norm
        engine.get_global_grad_norm = lambda: real() * 2


def wire(engine, number):
    """Gradients of one rank reach the others spoiled."""

    def send_nothing_finite(loss):
        for name in REDUCTIONS:
            real = getattr(comm, name)

            def spoiled(*args, real=real, **kwargs):
                tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
                if tensors[-1].is_floating_point():
                    spoil(tensors[-1])
                return real(*args, **kwargs)

            setattr(comm, name, spoiled)
        return loss

    return send_nothing_finite if number == 1 and dist.get_rank() == BAD else None


CASES = {  # what plants a number -> (ranks that have it, words of the sentence)
    weight: ("rank 1", "the parameter weight of model.layers.0.mlp.down_proj", "step 2, micro-batch 1"),
    embedding: ("rank 1", "inf in 4096 of 4096 numbers", "the parameter weight of model.embed_tokens"),
    scale: ("ranks 0-1", "inf in scale of attention of layer 0", "came in", "step 2, micro-batch 1"),
    module: ("rank 1", "the input of model.layers.0.mlp.down_proj", "no module before it made"),
    gradient: ("rank 1", "the gradient of the output of model.layers.0.post_attention_layernorm", "backward"),
    own_gradient: ("rank 1", "the gradient of model.norm.weight, which its backward made", "micro-batch 1"),
    hook: ("rank 1", "the gradient of model.norm.weight, though its backward made finite numbers", "micro-batch 1"),
    clipping: ("rank 1", "a gradient that ZeRO has summed, which was finite after backward", "clips"),
    optimizer_hook: ("ranks 0-1", "which optimizer step 2 made", "hooks"),
    loss: ("rank 1", "nan in 1 of 1 numbers in loss of LlamaForCausalLM", "micro-batch 1"),
    loss_outside: ("rank 1", "the loss, which came into backward", "micro-batch 2"),
    state: ("ranks 0-1", "exp_avg of the optimizer's state, before optimizer step 2", "step 2, micro-batch 2"),
    rate: ("ranks 0-1", "which optimizer step 2 made", "in step 2,"),
    wire: ("rank", "a gradient that ZeRO has summed, though the gradients of each rank were finite", "micro-batch 2"),
}


MORE = module, gradient, loss_outside, clipping, optimizer_hook  # for which test-all has time


def assert_told(case, by_rank):
    """All ranks are told the same sentence; the first rank that has the number raises it itself."""
    ranks, *words = CASES[case]
    kinds, sentences = zip(*by_rank, strict=True)
    first = kinds.index("InputError")
    sentence = sentences[first]
    assert is_one_sentence(sentence), by_rank
    assert missing(sentence, "check_finite", f"on {ranks}", *words) == [], (case, sentence)
    others = [(kind, text) for rank, (kind, text) in enumerate(by_rank) if rank != first]
    assert others == [("DisagreementError", f"rank {first} cannot go on: {sentence}")] * len(others), case


def trained(engine, plant):
    """Two steps of two micro-batches; something is planted in the second."""
    sp = engine.sequence_parallel
    for number in range(2):
        changed = plant(engine, number)
        for microbatch, batch in enumerate(sp.shard_batches(ragged(SECTION, 1, 2, sequences=1))):
            output = engine(**batch)
            engine.backward(changed(output.loss) if changed and microbatch else output.loss)
            engine.step()


def told(plants, stage):
    """What this rank is told of training into which each of these plants something."""
    found, real = [], {name: getattr(comm, name) for name in REDUCTIONS}
    for plant in plants:
        model = small()
        norm = model.model.norm.weight
        norm.register_hook(lambda x, norm=norm: x * math.nan if getattr(norm, "spoils", False) else x)
        engine, *_ = ds_seqpar.initialize(model=model, config=settings(SECTION, stage, 2, 2, **adam(1e-3)))
        found.append(refusal(trained, engine, plant))
        for name, function in real.items():
            setattr(comm, name, function)
        engine.sequence_parallel.close()
    return found


@pytest.mark.slow
def test_ranks_of_all_sequences_are_told():
    for place, plant in enumerate(plants := [weight, gradient]):
        assert_told(plant, [of_rank[place] for of_rank in on_engine_ranks(2 * WORLD, told, plants, "2")])


@pytest.mark.parametrize("stage", ["2", pytest.param("3", marks=pytest.mark.slow)])
def test_each_place_is_named_on_all_ranks(stage):
    plants = [x for x in (*CASES, norm, nothing) if stage == "3" or x not in MORE]
    found = on_engine_ranks(WORLD, told, plants, stage)
    for place, plant in enumerate(plants):
        by_rank = [of_rank[place] for of_rank in found]
        if plant in CASES:
            assert_told(plant, by_rank)
        elif plant is norm:
            assert by_rank == [("DisagreementError", by_rank[0][1])] * WORLD
            assert missing(by_rank[0][1], "gradient norm of step 2", "rank 0: norm", "rank 1: norm") == []
        else:
            assert by_rank == [(None, None)] * WORLD


def told_of_own_model():
    """What this rank is told of a hook in a model that calls sp.attention itself."""
    sp = SequenceParallel(SequenceParallelConfig(**SECTION))
    model = ScheduleOptions(sp)
    engine, *_ = ds_seqpar.initialize(model=model, config=settings(SECTION, "2", 1, 1), sequence_parallel=sp)
    if dist.get_rank() == BAD:
        model.out.weight.register_hook(lambda x: x * math.inf)
    (batch,) = sp.shard_batches(ragged(SECTION, 1, 1, sequences=1))
    return refusal(lambda: engine.backward(engine(**batch)))


@pytest.mark.slow
def test_a_hook_in_a_model_of_ones_own_is_named():
    for _, sentence in on_engine_ranks(WORLD, told_of_own_model):
        assert missing(sentence, "the gradient of out.weight, though its backward", "on rank 1, in step 1") == []


def told_by_a_trainer(folder):
    """What this rank is told of a Trainer whose model gets a weight that is not finite after the first step."""

    class Spoils(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            spoil(model.model.layers[0].self_attn.o_proj.weight)

    args = arguments(folder, 1, {"size": WORLD, "check_finite": True}, 2)
    trainer = SequenceParallelTrainer(small(), args, train_dataset=documents(8), data_collator=collate)
    trainer.add_callback(Spoils())
    return refusal(trainer.train)


def test_a_trainer_names_it(tmp_path):
    by_rank = on_trainer_ranks(WORLD, told_by_a_trainer, str(tmp_path))
    assert [kind for kind, _ in by_rank] == ["InputError", "DisagreementError"]
    for _, sentence in by_rank:
        assert missing(sentence, "model.layers.0.self_attn.o_proj", "on ranks 0-1, in step 2, micro-batch 1") == []


def told_in_a_loop(size):
    """What this rank is told of whole batches in a loop of one's own: of inputs_embeds, and under a checkpoint."""
    model = small()
    sp = share_sequences(model, size=size, check_finite=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    embedded = model.get_input_embeddings()(torch.arange(24)[None]).detach()
    model(inputs_embeds=embedded.requires_grad_()).logits.sum().backward()
    found = [refusal(lambda: model(inputs_embeds=embedded.detach() * math.inf))]
    backward = model.model.layers[0].mlp.down_proj.register_full_backward_pre_hook(lambda _, x: (x[0] * math.nan,))
    found.append(refusal(lambda: model(inputs_embeds=embedded).logits.sum().backward()))
    backward.remove()
    model.zero_grad()
    if dist.get_rank() == size - 1:
        model.model.norm.weight.register_hook(lambda x: x * math.nan)
    found.append(refusal(lambda: model(inputs_embeds=embedded).logits.sum().backward()))
    sp.close()
    return found


def test_a_loop_of_ones_own_names_it():
    inputs, backward, hooks = zip(*on_engine_ranks(WORLD, told_in_a_loop, WORLD), strict=True)
    for _, sentence in inputs:
        assert missing(sentence, "inputs_embeds of ", "came in", "on ranks 0-1, in forward 1 of the model") == []
    for _, sentence in backward:
        assert missing(sentence, "the gradient of ", "on ranks 0-1") == []
    for _, sentence in hooks:
        assert missing(sentence, "the gradient of model.norm.weight, though its backward", "on rank 1") == []
    alone = on_engine_ranks(1, told_in_a_loop, 1)[0]
    assert missing(alone[0][1], "inputs_embeds of ", "came in", "on rank 0") == []
