"""What the memory of a training step depends on, and what is said of it: numbers. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..compiler.masks import CAUSAL, Mask
from ..config import SequenceParallelConfig
from ..deepspeed_json import Zero

PARTS = {
    "parameters": "the rank's share of parameters, with fp32 copies",
    "gradients": "the rank's share of gradients, and those that are whole",
    "optimiser": "its states, and what its step needs for a moment",
    "buckets": "ZeRO's buffer for gradients on their way",
    "gathered": "parameters that ZeRO-3 has gathered whole",
    "checkpoints": "inputs of layers; or, without checkpoints, all that layers save",
    "kept attention": "what checkpoints keep of attention",
    "layer": "norms, projections, residuals and their gradients of the layer that is computed",
    "attention": "what its attention takes, sends and receives",
    "mlp": "what its MLP takes",
    "loss": "logits, their softmax and gradient",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The numbers of a model. intermediate: of the experts that a token goes to together, where there are any;
    parameters: all, tied ones once; layer_parameters: of one layer."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    parameters: int
    layer_parameters: int
    tied: bool = False

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What a step is made of. config: resolved; seq: tokens of the whole sequence; batch: sequences at once."""

    model: Model
    config: SequenceParallelConfig
    world: int
    seq: int
    batch: int = 1
    dtype: str = "bfloat16"
    zero: Zero = dataclasses.field(default_factory=Zero)
    checkpointing: bool = True
    mask: Mask = CAUSAL


@dataclasses.dataclass(frozen=True)
class Moment:
    """parts: bytes by name, of `PARTS`."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class Footprint:
    """resting: between steps; host: bytes in host memory beside these."""

    resting: Moment
    moments: tuple[Moment, ...]
    host: int = 0

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)
