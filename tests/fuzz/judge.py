"""Whether numbers are right: against dense fp64 attention, and one kernel call over the whole sequence."""

import dataclasses
import math

import torch

from ds_seqpar.core.runtime.kernels import BlockSpec, select
from tests import oracle
from tests.fuzz.tables import DTYPES, STRIDES

NAMES = ("out", "dq", "dk", "dv", "lse")
GRADIENTS = NAMES[1:4]
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}


def inputs(call, seq, seed=0):
    """Global q, k, v, do of a drawn call."""
    dtype, heads = DTYPES[call["dtype"]], (call["heads"], call["kv_heads"])
    shape = [call["batch"], seq, heads, call["head_dim"], torch.float64, call["seed"] + 100 * seed]
    return [_valued(call, number, x).to(dtype) for number, x in enumerate(oracle.tensors(*shape))]


def _valued(call, number, x):
    values, (tensor, *_) = call["values"], call["place"]
    equal = {"equal rows": 1, "equal heads": 2, "equal elements": 3}
    if values in equal and x.shape[equal[values]]:
        return x.narrow(equal[values], 0, 1).expand_as(x).contiguous()
    if values in ("zeros", "one"):
        return torch.full_like(x, values == "one")
    if values.startswith("all ") or (values in ("huge", "tiny") and number == tensor):
        return x * (1e4 if values.endswith("huge") else 1e-30)
    return x


def laid_out(call, tensors):
    """These, each with the strides drawn for it."""
    return [STRIDES[name](x) for name, x in zip(call["strides"], tensors, strict=False)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truth:
    """What is right, by name, over the whole sequence.

    exact: in fp64. single: one kernel call in the dtype. natural: the size of what is added up, where the sum may be 0.
    limit: of the error, relative to the greater of both. certain: whether rounding does not decide about gradients:
    backward takes exp(score - lse), and a score differs from the same one computed again.
    dtypes: that it is computed in, and those that it travels in.
    """

    exact: dict
    single: dict
    natural: dict
    limit: float
    certain: bool
    dtypes: tuple

    @classmethod
    def of(cls, whole, causal, scale, config, bf16=False):
        """For global q, k, v, do. bf16: whether autocast makes that of them."""
        dtype = torch.bfloat16 if bf16 and whole[0].dtype != torch.float64 else whole[0].dtype
        q, k, v, do = whole = [x.to(dtype) for x in whole]
        factor = q.shape[3] ** -0.5 if scale is None else float(scale)
        kernel = select(config.kernel, BlockSpec.of(q, k.shape[2]))
        out, lse = kernel.forward(q, k, v, causal, factor)
        grads = kernel.backward(do, q, k, v, out, lse, causal, factor)
        top = [_top(x) for x in whole]
        scores = factor * max(_products(q, k), top[0] * top[1] * math.sqrt(q.shape[3]))
        given = max(_products(do, v), top[3] * top[2])  # of which the mean is taken away
        natural = [top[2], *(factor * given * x for x in (top[1], top[0])), top[3], scores]
        rounding = 64 * torch.finfo(lse.dtype).eps * scores
        limit = max(LIMITS.get(dtype, 1e-5), rounding)
        if config.comm_dtype == "bf16":  # rounded once a hop
            limit += 2**-7 * config.size
        exact = [*oracle.dense(*whole, causal, factor), _lse(q, k, causal, factor)]
        return cls(
            exact=dict(zip(NAMES, exact, strict=True)),
            single=dict(zip(NAMES, (out, *grads, lse), strict=True)),
            natural=dict(zip(NAMES, natural, strict=True)),
            limit=limit,
            certain=rounding <= math.log(torch.finfo(torch.float32).max),
            dtypes=(dtype, *[torch.bfloat16] * (config.comm_dtype == "bf16")),
        )

    def faults(self, found, part=lambda x: x):
        """What is wrong with these tensors by name; part: takes this rank's tokens of a whole one."""
        faults = {name: self._fault(name, x, part) for name, x in found.items()}
        return {name: fault for name, fault in faults.items() if fault}

    def _fault(self, name, found, part):
        exact, single = part(self.exact[name]), part(self.single[name]).to(found.dtype)  # autocast's are cast back
        if found.shape != exact.shape:
            return f"shape {tuple(found.shape)} instead of {tuple(exact.shape)}"
        beyond = self.natural[name] * exact.shape[1] > torch.finfo(found.dtype).max  # the dtype: chance decides
        if beyond or (name in GRADIENTS and not self.certain):
            return None
        good = exact.isfinite() & single.isfinite() & (exact.abs() < 0.9 * torch.finfo(found.dtype).max)
        if not bool(found[good].isfinite().all()):
            return f"not finite where attention is, {int((~found[good].isfinite()).sum())} times"
        mine, alone = (x[good].double() - exact[good] for x in (found, single))
        smallest = max(torch.finfo(x).smallest_normal * torch.finfo(x).eps for x in (found.dtype, *self.dtypes))
        size = max(self.natural[name], _top(self.exact[name]), smallest / self.limit)
        return self._too_far(mine, alone, size, name)

    def _too_far(self, mine, alone, size, name):
        if not mine.numel():
            return None
        if self.dtypes[0] in LIMITS or name == "lse":
            error, limit = mine.abs().max().item() / size, self.limit
            if name == "lse":  # torch's CPU kernel takes a coarser exp for bf16 from 16 keys on
                limit = max(limit, 2 * alone.abs().max().item() / size)
        else:  # as root mean squares: the greatest single error is chance
            error = mine.square().mean().sqrt().item() / size
            single = alone.square().mean().sqrt().item() / size
            rounding = torch.finfo(self.dtypes[0]).eps / 2  # of one number, at the most; a quarter of it of many
            limit = 2 * single + rounding * (0.25 + mine.numel() ** -0.5) + self.limit
        return None if error <= limit else f"error {error:.3g}, limit {limit:.3g}"


def _products(x, y):
    """The greatest finite magnitude of x . y, of a row of the one (B, S, Hq, D) and one of the other (B, T, Hkv, D)."""
    return _top(torch.einsum("bqhd,bkhd->bhqk", x.double(), y.double().repeat_interleave(x.shape[2] // y.shape[2], 2)))


def _top(x):
    """The greatest finite magnitude."""
    finite = x[x.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


def _lse(q, k, causal, scale):
    keys = k.double().repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), keys) * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    return scores.logsumexp(-1).transpose(1, 2)
