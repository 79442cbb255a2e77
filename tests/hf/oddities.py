"""Small models of one's own around one correct base, each with an oddity that sharing its sequences would get wrong."""

import dataclasses
import math
import types
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.hf.every_type import enlivened

LOWEST = torch.finfo(torch.float32).min


class OddConfig(PreTrainedConfig):
    model_type = "odd"

    vocab_size: int = 64
    hidden_size: int = 32
    intermediate_size: int = 48
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    max_position_embeddings: int = 128
    attention_dropout: float = 0.0
    use_cache: bool = False


# --- the base


def rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def angles(positions, dim, base=100.0):
    angle = positions[:, None, :, None] * base ** -(torch.arange(dim // 2, device=positions.device) * 2 / dim)
    return angle.cos(), angle.sin()


def eager_attention_forward(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling,
    dropout=0.0,
    softcap=None,
    position_bias=None,
    s_aux=None,
    **kwargs,
):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if position_bias is None else scores + position_bias
    scores = scores if attention_mask is None else scores + attention_mask
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1) if s_aux.dim() == 1 else s_aux
        scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], dim=-1)
    weights = F.dropout(scores.softmax(-1)[..., : key.shape[2]], dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class OddAttention(nn.Module):
    value_dim = None  # head_dim
    is_causal = True

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.attention_dropout, self.scaling = config.attention_dropout, config.head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        heads, kv_heads, values = (
            config.num_attention_heads,
            config.num_key_value_heads,
            self.value_dim or self.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * values, bias=False)
        self.o_proj = nn.Linear(heads * values, config.hidden_size, bias=False)

    def forward(self, hidden, position_ids, attention_mask, **kwargs):
        q, k, v = self.states(hidden, position_ids)
        return self.o_proj(self.attend(q, k, v, attention_mask, **self.options(q), **kwargs).flatten(2))

    def states(self, hidden, position_ids):
        heads = hidden.shape[1]
        q, k, v = (
            proj(hidden).unflatten(-1, (number, -1)).transpose(1, 2)
            for proj, number in (
                (self.q_proj, self.config.num_attention_heads),
                (self.k_proj, self.config.num_key_value_heads),
                (self.v_proj, self.config.num_key_value_heads),
            )
        )
        return *self.rotate(q, k, position_ids, heads), v

    def rotate(self, q, k, position_ids, tokens):
        cos, sin = angles(position_ids, self.head_dim)
        return rotated(q, cos, sin), rotated(k, cos, sin)

    def options(self, q):
        return {}

    def attend(self, q, k, v, attention_mask, **kwargs):
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        return function(self, q, k, v, attention_mask, **{"dropout": dropout, "scaling": self.scaling, **kwargs})[0]


class OddMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden):
        return self.down_proj(F.gelu(self.up_proj(hidden)))


class OddLayer(GradientCheckpointingLayer):
    attention_type, mlp_type = OddAttention, OddMLP
    mixer_type: Callable | None = None  # a module (dim) between attention and the MLP

    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn, self.mlp = self.attention_type(config, layer_idx), self.mlp_type(config)
        self.input_norm, self.post_norm = nn.RMSNorm(config.hidden_size), nn.RMSNorm(config.hidden_size)
        if self.mixer_type is not None:
            self.mixer = self.mixer_type(config.hidden_size)

    def forward(self, hidden, position_ids, attention_mask, **kwargs):
        hidden = hidden + self.self_attn(self.input_norm(hidden), position_ids, attention_mask, **kwargs)
        if self.mixer_type is not None:
            hidden = hidden + self.mixer(hidden)
        return hidden + self.mlp(self.post_norm(hidden))


class OddPreTrainedModel(PreTrainedModel):
    config_class = OddConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_attention_backend = True
    _no_split_modules = ("OddLayer",)


class OddModel(OddPreTrainedModel):
    layer_type = OddLayer

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.layer_type(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.post_init()

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
        use_cache=None, **kwargs
    ):  # fmt: skip
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        mask = create_causal_mask(self.config, hidden, attention_mask, past_key_values, position_ids=position_ids)
        hidden = self.embedded(hidden, position_ids, input_ids)
        for layer in self.layers:
            hidden = layer(hidden, position_ids, self.masked(mask, hidden), **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

    def embedded(self, hidden, position_ids, input_ids):
        return hidden

    def masked(self, mask, hidden):
        return mask


class OddForCausalLM(OddPreTrainedModel, GenerationMixin):
    base_type = OddModel

    def __init__(self, config):
        super().__init__(config)
        self.model = self.base_type(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, logits_to_keep=0, **kwargs):
        output = self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        logits = self.logits(output.last_hidden_state)
        kwargs = {name: kwargs.get(name) for name in ("shift_labels", "num_items_in_batch")}
        has_labels = labels is not None or kwargs["shift_labels"] is not None
        loss = self.loss(output.last_hidden_state, logits, labels, **kwargs) if has_labels else None
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def logits(self, hidden):
        return self.lm_head(hidden)

    def loss(self, hidden, logits, labels, **kwargs):
        return self.loss_function(logits, labels, self.config.vocab_size, **kwargs)


# --- oddities


@dataclasses.dataclass(frozen=True)
class Oddity:
    make: Callable  # () -> a model
    outcome: str  # "refused"; "exact"; "either": whole outputs, or keys of the same tokens, may be right
    place: str = ""  # what a refusal names


ODDITIES = {}


def of(outcome, place="", config=None, base=OddForCausalLM):
    """Decorate a class, or a function that changes a model, to be an oddity of its name."""

    def decorate(odd):
        def make():
            if not isinstance(odd, type):
                model = base(config or OddConfig(attn_implementation="eager"))
                return odd(model) or model
            return _with(odd)(OddConfig(attn_implementation="eager", **(config or {})))

        ODDITIES[odd.__name__] = Oddity(make, outcome, place)
        return odd

    return decorate


def _with(part):
    """Return the class of a head with this class somewhere inside."""
    if issubclass(part, (OddForCausalLM, LlamaForCausalLM)):
        return part
    slots = ((OddAttention, OddLayer, "attention_type"), (OddMLP, OddLayer, "mlp_type"),
             (OddLayer, OddModel, "layer_type"), (OddModel, OddForCausalLM, "base_type"))  # fmt: skip
    for inner, outer, slot in slots:
        if issubclass(part, inner):
            return _with(_class(f"{part.__name__}In{outer.__name__}", outer, {slot: part}))
    return _with(_class(f"{part.__name__}InLayer", OddLayer, {"mixer_type": part}))


def _class(name, outer, slots):
    """Return a class that is found by its name in this file, as those of models are."""
    made = type(name, (outer,), {**slots, "__module__": __name__})
    globals()[name] = made
    return made


# tokens that meet outside of attention


@of("refused", "mixer")
class Convolution(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv = nn.Conv1d(dim, dim, 3, padding=2, groups=dim)

    def forward(self, hidden):
        return self.conv(hidden.transpose(1, 2))[..., : hidden.shape[1]].transpose(1, 2)


@of("refused", "mixer")
class RunningMean(nn.Identity):
    def forward(self, hidden):
        return hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1)[:, None]


@of("refused", "mixer")
class Roll(nn.Identity):
    def forward(self, hidden):
        return F.pad(hidden[:, :-1], (0, 0, 1, 0))


@of("refused", "mixer")
class RecurrentCell(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.cell = nn.GRU(dim, dim, batch_first=True)

    def forward(self, hidden):
        return self.cell(hidden)[0]


@of("refused", "mixer")
class BatchNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, hidden):
        return self.norm(hidden.transpose(1, 2)).transpose(1, 2)


@of("refused", "mixer")
class Pooling(nn.Identity):
    def forward(self, hidden):
        return F.avg_pool1d(F.pad(hidden.transpose(1, 2), (2, 0)), 3, stride=1).transpose(1, 2)


@of("refused", "mixer")
class NormOverSequence(nn.Identity):
    def forward(self, hidden):
        return (hidden - hidden.mean(1, keepdim=True)) / (hidden.std(1, keepdim=True) + 1)


@of("refused", "mixer")
class SoftmaxOverTokens(nn.Identity):
    def forward(self, hidden):
        return hidden * hidden.softmax(1)


@of("refused", "mixer")
class SortedTokens(nn.Identity):
    """Only the half of tokens with the largest norm goes through (mixture of depths)."""

    def forward(self, hidden):
        sizes = hidden.norm(dim=-1)
        return hidden * (sizes >= sizes.median(1, keepdim=True).values)[..., None]


@of("refused", "embed")
class PreviousToken(OddModel):
    """An n-gram hash: the embedding of a token and the one before it."""

    def embedded(self, hidden, position_ids, input_ids):
        return hidden + self.embed_tokens((input_ids * 7 + F.pad(input_ids[:, :-1], (1, 0))) % self.config.vocab_size)


@of("either")
class LogitsOverTokens(OddForCausalLM):
    def logits(self, hidden):
        logits = self.lm_head(hidden)
        return logits - logits.mean(1, keepdim=True)


@of("refused")
class HookOfClass(OddForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].register_forward_hook(lambda module, args, output: output.roll(1, 1))


@of("refused")
def hook_of_instance(model):
    model.model.layers[0].register_forward_hook(lambda module, args, output: output.roll(1, 1))


@of("refused")
def forward_of_instance(model):
    mlp = model.model.layers[1].mlp
    mlp.forward = types.MethodType(lambda self, hidden: type(self).forward(self, hidden.roll(1, 1)), mlp)


# what attention sees


@of("refused", "self_attn")
class LooksAhead(OddModel):
    def masked(self, mask, hidden):
        tokens = hidden.shape[1]
        return torch.full((tokens, tokens), LOWEST).triu(2)[None, None]


@of("refused", "self_attn")
class Prefix(OddModel):
    """The first tokens see one another."""

    def masked(self, mask, hidden):
        tokens = torch.arange(hidden.shape[1])
        return torch.where((tokens[:, None] >= tokens) | (tokens < 6), 0.0, LOWEST)[None, None]


class ByMaker(OddModel):
    """What transformers' maker of causal masks is called with besides."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        embeds = self.embed_tokens(input_ids)
        mask = create_causal_mask(self.config, embeds, attention_mask, None, position_ids, **self.overlays())
        return super().forward(input_ids, attention_mask=mask, position_ids=position_ids, **kwargs)


@of("refused", "self_attn")
class PrefixByMaker(ByMaker):
    def overlays(self):
        return {"or_mask_function": lambda row, head, query, key: key < 6}


@of("refused", "not one interval")
class DilatedByMaker(ByMaker):
    def overlays(self):
        return {"and_mask_function": lambda row, head, query, key: (query - key) % 2 == 0}


@of("refused", "neither all before it")
class NearByMaker(ByMaker):
    """A window that its config does not have."""

    def overlays(self):
        return {"and_mask_function": lambda row, head, query, key: query - key < 7}


@of("refused", "self_attn")
class WindowByBlock(OddModel):
    """A token sees its block and the one before."""

    def masked(self, mask, hidden):
        tokens = torch.arange(hidden.shape[1])
        seen = (tokens[:, None] >= tokens) & (tokens[:, None] // 8 - tokens // 8 <= 1)
        return torch.where(seen, 0.0, LOWEST)[None, None]


@of("either")
class Chunks(OddModel):
    def masked(self, mask, hidden):
        tokens = torch.arange(hidden.shape[1])
        return torch.where((tokens[:, None] >= tokens) & (tokens[:, None] // 8 == tokens // 8), 0.0, LOWEST)[None, None]


@of("refused", "self_attn")
class Both(OddAttention):
    is_causal = False

    def attend(self, q, k, v, attention_mask, **kwargs):
        return super().attend(q, k, v, None, is_causal=False, **kwargs)


@of("refused", "self_attn")
class Twice(OddAttention):
    """Attends again, to the states of the token before."""

    def attend(self, q, k, v, attention_mask, **kwargs):
        again = super().attend(q.roll(1, 2), k.roll(1, 2), v.roll(1, 2), attention_mask, **kwargs)
        return super().attend(q, k, v, attention_mask, **kwargs) + again


@of("refused", "self_attn")
class MixedKeys(OddAttention):
    """Keys look at the token before (zaya)."""

    def states(self, hidden, position_ids):
        q, k, v = super().states(hidden, position_ids)
        return q, k + F.pad(k[:, :, :-1], (0, 0, 1, 0)), v


class Kept(OddAttention):
    """Attends to keys that another layer kept: those of the layer `away` from this one."""

    away = 0

    def attend(self, q, k, v, attention_mask, **kwargs):
        kept = kwargs.pop("kept")
        kept[self.layer_idx] = k
        return super().attend(q, kept.get(self.layer_idx + self.away, k), v, attention_mask, **kwargs)


class Keeping(OddModel):
    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids, kept={}, **kwargs)


def keeping(attention):
    layer = _class(f"{attention.__name__}Layer", OddLayer, {"attention_type": attention})
    return _class(f"{attention.__name__}Model", Keeping, {"layer_type": layer})


@of("either")
class KeysOfLayerBefore(OddForCausalLM):
    """Of the same tokens, so that sharing gets it right."""

    base_type = keeping(_class("KeptBefore", Kept, {"away": -1}))


class KeptNext(Kept):
    """Attends to the keys that the next layer had in the forward before."""

    away, kept = 1, {}

    def attend(self, q, k, v, attention_mask, **kwargs):
        old = self.kept.get(1 - self.layer_idx)
        self.kept[self.layer_idx] = k.detach()
        fits = self.layer_idx == 0 and old is not None and old.shape == k.shape
        return OddAttention.attend(self, q, old if fits else k, v, attention_mask, **kwargs)


@of("either")
class KeysOfNextLayer(OddLayer):
    attention_type = KeptNext


@of("refused", "self_attn")
class OutsideInterface(OddAttention):
    def attend(self, q, k, v, attention_mask, **kwargs):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling, enable_gqa=True).transpose(
            1, 2
        )


@of("refused", "self_attn")
class Bias(OddAttention):
    """A bias of distances, in a keyword."""

    def options(self, q):
        tokens = torch.arange(q.shape[2])
        return {"position_bias": -0.3 * (tokens[:, None] - tokens).abs().float()}


@of("refused", "self_attn")
class MaskOfValues(OddModel):
    """The bias in the mask (ALiBi)."""

    def masked(self, mask, hidden):
        tokens = torch.arange(hidden.shape[1])
        distance = tokens[:, None] - tokens
        return torch.where(distance >= 0, -0.3 * distance, LOWEST)[None, None]


@of("refused", "self_attn")
class SinkOfQuery(OddAttention):
    """A sink for each token, and not for each head."""

    def options(self, q):
        return {"s_aux": q.sum(-1, keepdim=True)}


@of("refused", "self_attn")
class ScaleOfLength(OddAttention):
    def options(self, q):
        return {"scaling": self.scaling * math.log(q.shape[2])}


@of("refused", "self_attn")
class SoftcapOfLength(OddAttention):
    def options(self, q):
        return {"softcap": q.shape[2] / 16}


@of("refused", "attention_dropout", config={"attention_dropout": 0.1})
class Dropout(OddForCausalLM):
    pass


# positions


@of("refused")
class AbsolutePositions(OddModel):
    def embedded(self, hidden, position_ids, input_ids):
        at = torch.arange(hidden.shape[1])
        return hidden + torch.sin(at[:, None] / (1 + torch.arange(hidden.shape[2])))


@of("refused")
class LearnedPositions(OddModel):
    def __init__(self, config):
        super().__init__(config)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def embedded(self, hidden, position_ids, input_ids):
        return hidden + self.positions(torch.arange(hidden.shape[1]))


@of("refused", "self_attn")
class PositionsIgnored(OddAttention):
    def rotate(self, q, k, position_ids, tokens):
        return super().rotate(q, k, torch.arange(tokens)[None], tokens)


@of("refused", "self_attn")
class RopeOfLength(OddAttention):
    """A base that grows with the length (dynamic NTK), by itself."""

    def rotate(self, q, k, position_ids, tokens):
        cos, sin = angles(position_ids, self.head_dim, 10.0 * tokens)
        return rotated(q, cos, sin), rotated(k, cos, sin)


# the loss


def token_losses(logits, labels, shift_labels):
    labels = F.pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none"), labels != -100


@of("either")
class LossOfPairs(OddForCausalLM):
    """Pushes apart the states of tokens that follow one another."""

    def loss(self, hidden, logits, labels, **kwargs):
        return super().loss(hidden, logits, labels, **kwargs) + 0.1 * (hidden[:, 1:] * hidden[:, :-1]).mean()


@of("either")
class LossNotShifted(OddForCausalLM):
    def loss(self, hidden, logits, labels, **kwargs):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@of("either")
class LossBySequence(OddForCausalLM):
    """The mean of the rows' means."""

    def loss(self, hidden, logits, labels, shift_labels=None, num_items_in_batch=None):
        losses, counted = token_losses(logits, labels, shift_labels)
        return ((losses * counted).sum(1) / counted.sum(1).clamp(min=1)).mean()


@of("either")
class LossOfMaximum(OddForCausalLM):
    """The tokens that are hardest count alone."""

    def loss(self, hidden, logits, labels, shift_labels=None, num_items_in_batch=None):
        losses, counted = token_losses(logits, labels, shift_labels)
        return (losses * counted).flatten().topk(5).values.mean()


# experts


class Routed(OddMLP):
    def __init__(self, config):
        super().__init__(config)
        self.router = nn.Linear(config.hidden_size, 2, bias=False)
        self.other = OddMLP(config)

    def forward(self, hidden):
        first, second = self.weights(self.router(hidden)).unbind(-1)
        return first[..., None] * super().forward(hidden) + second[..., None] * self.other(hidden)

    def weights(self, scores):
        return scores.softmax(-1)


@of("exact")
class Experts(Routed):
    pass


@of("refused", "mlp")
class BalancedOverSequence(Routed):
    """Each expert gets the same weight of all tokens together (Sinkhorn)."""

    def weights(self, scores):
        return scores.softmax(1) * scores.shape[1] / 2


@of("refused", "mlp")
class Capacity(Routed):
    """An expert takes the first tokens that chose it."""

    def weights(self, scores):
        chosen = F.one_hot(scores.argmax(-1), 2)
        return scores.softmax(-1) * (chosen.cumsum(1) <= 10) * chosen


# a tested family, and more in it


class OddLlama(LlamaForCausalLM):
    def __init__(self, config):
        sizes = vars(OddConfig())
        names = [name for name in vars(LlamaConfig()) if name in sizes and name not in ("model_type", "architectures")]
        super().__init__(LlamaConfig(**{name: sizes[name] for name in names}, attn_implementation="eager"))


@of("exact")
class PlainLlama(OddLlama):
    pass


@of("refused", "layers.0.mlp")
class LlamaWithConvolution(OddLlama):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].mlp = nn.Sequential(self.model.layers[0].mlp, Convolution(self.config.hidden_size))


@of("refused", base=OddLlama)
def llama_with_a_hook(model):
    model.model.layers[0].register_forward_hook(lambda module, args, output: output.roll(1, 1))


# what is right


@of("exact")
class Plain(OddForCausalLM):
    pass


@of("exact")
class ScaleOfItsOwn(OddAttention):
    def options(self, q):
        return {"scaling": 0.7}


@of("exact")
class Softcap(OddAttention):
    def options(self, q):
        return {"softcap": 2.0}


@of("exact", config={"num_key_value_heads": 1})
class OneKeyHead(OddForCausalLM):
    pass


@of("exact")
class NarrowValues(OddAttention):
    """Heads of values are smaller than those of keys, as in latent attention."""

    value_dim = 4


@of("exact")
class NoPositionsInOneLayer(OddAttention):
    def rotate(self, q, k, position_ids, tokens):
        return (q, k) if self.layer_idx else super().rotate(q, k, position_ids, tokens)


@of("exact")
class Sinks(OddAttention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.sinks = nn.Parameter(torch.randn(config.num_attention_heads))

    def options(self, q):
        return {"s_aux": self.sinks}


@of("exact")
class LearnedFromPositionIds(OddModel):
    def __init__(self, config):
        super().__init__(config)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def embedded(self, hidden, position_ids, input_ids):
        return hidden + self.positions(position_ids)


def build(name):
    """Return the model of an oddity, with weights that are the same each time."""
    torch.manual_seed(0)
    return enlivened(ODDITIES[name].make()).train()
