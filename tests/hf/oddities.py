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
    module, query, key, value, attention_mask, scaling, dropout=0.0, softcap=None, position_bias=None, s_aux=None, **_
):  # fmt: skip
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
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.heads, values = (heads, kv_heads, kv_heads), self.value_dim or self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * values, bias=False)
        self.o_proj = nn.Linear(heads * values, config.hidden_size, bias=False)

    def forward(self, hidden, position_ids, attention_mask, **kwargs):
        q, k, v = self.states(hidden, position_ids)
        return self.o_proj(self.attend(q, k, v, attention_mask, **self.options(q), **kwargs).flatten(2))

    def states(self, hidden, position_ids):
        q, k, v = (
            proj(hidden).unflatten(-1, (-1, proj.out_features // heads)).transpose(1, 2)
            for proj, heads in zip((self.q_proj, self.k_proj, self.v_proj), self.heads, strict=True)
        )
        return *self.rotate(q, k, position_ids, hidden.shape[1]), v

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


class Mixer(nn.Module):
    """Calls a function with a module inside, and with hidden states."""

    def __init__(self, dim):
        super().__init__()
        self.inner = self.module(dim)

    def forward(self, hidden):
        return self.mix(self.inner, hidden)


def of_most_tokens(_, x):
    """Only the half of tokens with the largest norm goes through (mixture of depths)."""
    sizes = x.norm(dim=-1)
    return x * (sizes >= sizes.median(1, keepdim=True).values)[..., None]


# name -> (dim -> a module, (that module, hidden states) -> hidden states)
MIXERS = {
    "Convolution": (
        lambda dim: nn.Conv1d(dim, dim, 3, padding=2, groups=dim),
        lambda conv, x: conv(x.mT)[..., : x.shape[1]].mT,
    ),
    "RecurrentCell": (lambda dim: nn.GRU(dim, dim, batch_first=True), lambda cell, x: cell(x)[0]),
    "BatchNorm": (nn.BatchNorm1d, lambda norm, x: norm(x.mT).mT),
    "RunningMean": (nn.Identity, lambda _, x: x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]),
    "Roll": (nn.Identity, lambda _, x: F.pad(x[:, :-1], (0, 0, 1, 0))),
    "Pooling": (nn.Identity, lambda _, x: F.avg_pool1d(F.pad(x.mT, (2, 0)), 3, stride=1).mT),
    "NormOverSequence": (nn.Identity, lambda _, x: (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1)),
    "SoftmaxOverTokens": (nn.Identity, lambda _, x: x * x.softmax(1)),
    "SortedTokens": (nn.Identity, of_most_tokens),
}
for name, (module, mix) in MIXERS.items():
    of("refused", "mixer")(_class(name, Mixer, {"module": staticmethod(module), "mix": staticmethod(mix)}))


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
        hook_of_instance(self)


@of("refused")
def hook_of_instance(model):
    model.model.layers[0].register_forward_hook(lambda module, args, output: output.roll(1, 1))


@of("refused")
def forward_of_instance(model):
    mlp = model.model.layers[1].mlp
    mlp.forward = types.MethodType(lambda self, hidden: type(self).forward(self, hidden.roll(1, 1)), mlp)


# what attention sees


class OwnMask(OddModel):
    def masked(self, mask, hidden):
        at = torch.arange(hidden.shape[1])
        seen = self.sees(at[:, None], at)
        return (torch.where(seen, 0.0, LOWEST) if seen.dtype == torch.bool else seen)[None, None]


# name -> (outcome, (queries, keys) -> which keys each sees, or what is added to scores)
MASKS = {
    "LooksAhead": ("refused", lambda q, k: k <= q + 1),
    "Prefix": ("refused", lambda q, k: (k <= q) | (k < 6)),
    "WindowByBlock": ("refused", lambda q, k: (k <= q) & (q // 8 - k // 8 <= 1)),
    "Chunks": ("either", lambda q, k: (k <= q) & (q // 8 == k // 8)),
    "MaskOfValues": ("refused", lambda q, k: torch.where(k <= q, -0.3 * (q - k), LOWEST)),  # ALiBi
}
for name, (outcome, sees) in MASKS.items():
    of(outcome, "self_attn" * (outcome == "refused"))(_class(name, OwnMask, {"sees": staticmethod(sees)}))


class ByMaker(OddModel):
    """What transformers' maker of causal masks is called with besides."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        embeds = self.embed_tokens(input_ids)
        mask = create_causal_mask(self.config, embeds, attention_mask, None, position_ids, **self.overlay)
        return super().forward(input_ids, attention_mask=mask, position_ids=position_ids, **kwargs)


MAKERS = {  # the last is a window that its config does not have
    "PrefixByMaker": ("self_attn", {"or_mask_function": lambda row, head, query, key: key < 6}),
    "DilatedByMaker": ("not one interval", {"and_mask_function": lambda row, head, query, key: (query - key) % 2 == 0}),
    "NearByMaker": ("neither all before it", {"and_mask_function": lambda row, head, query, key: query - key < 7}),
}
for name, (place, overlay) in MAKERS.items():
    of("refused", place)(_class(name, ByMaker, {"overlay": overlay}))


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
    """Attends to the keys that another layer kept last: in this forward, or in the one before."""

    kept = None  # of each layer

    def attend(self, q, k, v, attention_mask, **kwargs):
        old = self.kept.get(1 - self.layer_idx)
        self.kept[self.layer_idx] = k if self.now else k.detach()
        fits = self.layer_idx == self.now and old is not None and old.shape == k.shape
        return super().attend(q, old if fits else k, v, attention_mask, **kwargs)


for name, now in (("KeysOfLayerBefore", 1), ("KeysOfNextLayer", 0)):  # of the same tokens, so that sharing is right
    of("either")(_class(name, Kept, {"now": now, "kept": {}}))


@of("refused", "self_attn")
class OutsideInterface(OddAttention):
    def attend(self, q, k, v, attention_mask, **kwargs):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling, enable_gqa=True)
        return out.transpose(1, 2)


def distances(module, q):
    tokens = torch.arange(q.shape[2])
    return -0.3 * (tokens[:, None] - tokens).abs().float()


# name -> (outcome, keyword of attention's function, (module, q) -> its value)
OPTIONS = {
    "Bias": ("refused", "position_bias", distances),
    "SinkOfQuery": ("refused", "s_aux", lambda module, q: q.sum(-1, keepdim=True)),  # and not of a head
    "ScaleOfLength": ("refused", "scaling", lambda module, q: module.scaling * math.log(q.shape[2])),
    "SoftcapOfLength": ("refused", "softcap", lambda module, q: q.shape[2] / 16),
    "ScaleOfItsOwn": ("exact", "scaling", lambda module, q: 0.7),
    "Softcap": ("exact", "softcap", lambda module, q: 2.0),
}
for name, (outcome, keyword, value) in OPTIONS.items():
    options = {"options": lambda self, q, keyword=keyword, value=value: {keyword: value(self, q)}}
    of(outcome, "self_attn" * (outcome == "refused"))(_class(name, OddAttention, options))


@of("exact")
class Sinks(OddAttention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.sinks = nn.Parameter(torch.randn(config.num_attention_heads))

    def options(self, q):
        return {"s_aux": self.sinks}


@of("exact")
class NarrowValues(OddAttention):
    """Heads of values are smaller than those of keys, as in latent attention."""

    value_dim = 4


# positions


@of("refused")
class AbsolutePositions(OddModel):
    def embedded(self, hidden, position_ids, input_ids):
        at = torch.arange(hidden.shape[1])
        return hidden + torch.sin(at[:, None] / (1 + torch.arange(hidden.shape[2])))


@of("exact")
class LearnedFromPositionIds(OddModel):
    def __init__(self, config):
        super().__init__(config)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def embedded(self, hidden, position_ids, input_ids):
        return hidden + self.positions(position_ids)


@of("refused")
class LearnedPositions(LearnedFromPositionIds):
    def embedded(self, hidden, position_ids, input_ids):
        return super().embedded(hidden, torch.arange(hidden.shape[1]), input_ids)


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


@of("exact")
class NoPositionsInOneLayer(OddAttention):
    def rotate(self, q, k, position_ids, tokens):
        return (q, k) if self.layer_idx else super().rotate(q, k, position_ids, tokens)


# the loss


class OwnLoss(OddForCausalLM):
    def loss(self, hidden, logits, labels, shift_labels=None, **kwargs):
        mean = super().loss(hidden, logits, labels, shift_labels=shift_labels, **kwargs)
        shifted = F.pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
        losses = F.cross_entropy(logits.transpose(1, 2), shifted, reduction="none")
        return self.of_tokens(hidden, logits, labels, mean, losses, shifted != -100)


# (hidden states, logits, labels, mean loss, losses of tokens, which of them count) -> the loss
LOSSES = {
    "LossOfPairs": lambda hidden, logits, labels, mean, *_: mean + 0.1 * (hidden[:, 1:] * hidden[:, :-1]).mean(),
    "LossNotShifted": lambda hidden, logits, labels, *_: F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
    "LossBySequence": lambda hidden, logits, labels, mean, losses, counted: (
        (losses * counted).sum(1) / counted.sum(1).clamp(min=1)
    ).mean(),
    "LossOfMaximum": lambda hidden, logits, labels, mean, losses, counted: (
        (losses * counted).flatten().topk(5).values.mean()
    ),
}
for name, loss in LOSSES.items():
    of("either")(_class(name, OwnLoss, {"of_tokens": staticmethod(loss)}))


# experts


class Routed(OddMLP):
    def __init__(self, config):
        super().__init__(config)
        self.router = nn.Linear(config.hidden_size, 2, bias=False)
        self.other = OddMLP(config)

    def forward(self, hidden):
        first, second = self.weights(self.router(hidden)).unbind(-1)
        return first[..., None] * super().forward(hidden) + second[..., None] * self.other(hidden)


def of_first_tokens(scores):
    """An expert takes the first tokens that chose it."""
    chosen = F.one_hot(scores.argmax(-1), 2)
    return scores.softmax(-1) * (chosen.cumsum(1) <= 10) * chosen


# name -> (outcome, scores -> weights); each expert gets the same weight of all tokens together (Sinkhorn)
ROUTERS = {
    "Experts": ("exact", lambda scores: scores.softmax(-1)),
    "BalancedOverSequence": ("refused", lambda scores: scores.softmax(1) * scores.shape[1] / 2),
    "Capacity": ("refused", of_first_tokens),
}
for name, (outcome, weights) in ROUTERS.items():
    of(outcome, "mlp" * (outcome == "refused"))(_class(name, Routed, {"weights": staticmethod(weights)}))


# a tested family, and more in it


class OddLlama(LlamaForCausalLM):
    def __init__(self, config):
        sizes = vars(OddConfig())
        names = [name for name in vars(LlamaConfig()) if name in sizes and name not in ("model_type", "architectures")]
        super().__init__(LlamaConfig(**{name: sizes[name] for name in names}, attn_implementation="eager"))


@of("refused", "layers.0.mlp")
class LlamaWithConvolution(OddLlama):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].mlp = nn.Sequential(self.model.layers[0].mlp, Convolution(self.config.hidden_size))  # noqa: F821


@of("refused", base=OddLlama)
def llama_with_a_hook(model):
    hook_of_instance(model)


# what only the config says, and what is right

of("exact")(_class("PlainLlama", OddLlama, {}))
of("exact")(_class("Plain", OddForCausalLM, {}))
of("exact", config={"num_key_value_heads": 1})(_class("OneKeyHead", OddForCausalLM, {}))
of("refused", "attention_dropout", config={"attention_dropout": 0.1})(_class("Dropout", OddForCausalLM, {}))


def build(name):
    """Return the model of an oddity, with weights that are the same each time."""
    torch.manual_seed(0)
    return enlivened(ODDITIES[name].make()).train()
