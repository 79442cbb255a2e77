"""What the words in a drawn case stand for."""

import warnings

import numpy as np
import torch


class Unspeakable:
    """Fails whatever is asked of it."""

    def __repr__(self):
        raise RuntimeError("this value has\nno words. None.")

    __str__ = __bool__ = __float__ = __le__ = __ge__ = __eq__ = __len__ = __iter__ = __repr__
    __hash__ = object.__hash__


DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
    "complex64": torch.complex64,
}
CAUSAL = {
    "True": True,
    "False": False,
    "None": None,
    "1": 1,
    "0": 0,
    "word": "True",
    "tensor": torch.tensor(True),
    "numpy": np.bool_(True),
    "list": [True],
    "unspeakable": Unspeakable(),
}
SCALES = {
    "None": None,
    "0.3": 0.3,
    "1": 1,
    "2.0": 2.0,
    "tiny": 1e-30,
    "numpy": np.float32(0.5),
    "zero": 0.0,
    "negative": -0.5,
    "NaN": float("nan"),
    "infinite": float("inf"),
    "subnormal": 1e-310,
    "beyond fp32": 1e300,
    "huge int": 10**400,
    "word": "0.5",
    "True": True,
    "complex": 1j,
    "tensor": torch.tensor(0.5),
    "list": [0.5],
    "unspeakable": Unspeakable(),
}
MODES = ("no_grad", "inference", "autocast")
# name -> the same values (B, s, H, D), otherwise laid out in memory
STRIDES = {
    "dense": lambda x: x.contiguous(),
    "heads before tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "last two swapped": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "unbound third": lambda x: torch.stack([x, x.flip(0), x], dim=2).unbind(2)[0],
    "unbound last": lambda x: torch.stack([x, -x, x], dim=-1).unbind(-1)[0],
    "dims before all": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "every other element": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
    "every other row": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "inside a larger one": lambda x: torch.nn.functional.pad(x, (3, 1, 1, 2, 2, 1))[:, 2:-1, 1:-2, 3:-1],
    "negative bit": lambda x: torch.complex(x, -x).conj().imag if x.dtype in (torch.float32, torch.float64) else x,
    "expanded": lambda x: _expanded(x),
}
VALUES = (
    "zeros", "all huge", "all tiny", "huge", "tiny", "equal rows", "equal heads", "equal elements", "one",
)  # fmt: skip
# what makes of good q, k, v one that cannot be taken; each gets (q, k, v) in a list and may change it
FORMS = {
    "good": lambda x: x,
    "q None": lambda x: [None, *x[1:]],
    "k a list": lambda x: [x[0], x[1].tolist(), x[2]],
    "v numpy": lambda x: [*x[:2], x[2].detach().float().numpy()],
    "q a word": lambda x: ["q", *x[1:]],
    "q unspeakable": lambda x: [Unspeakable(), *x[1:]],
    "q of 3 dims": lambda x: [x[0][0], *x[1:]],
    "all of 3 dims": lambda x: [y[0] for y in x],
    "k longer": lambda x: [x[0], torch.cat([x[1], x[1][:, :1]], 1), x[2]],
    "k and v longer": lambda x: [x[0], *(torch.cat([y, y[:, :1]], 1) for y in x[1:])],
    "v wider": lambda x: [*x[:2], torch.nn.functional.pad(x[2], (0, 1))],
    "q wider": lambda x: [torch.nn.functional.pad(x[0], (0, 1)), *x[1:]],
    "q of another batch": lambda x: [torch.cat([x[0], x[0]]), *x[1:]],
    "k int": lambda x: [x[0], x[1].long(), x[2]],
    "v bool": lambda x: [*x[:2], x[2].bool()],
    "q complex": lambda x: [x[0].to(torch.complex64), *x[1:]],
    "k sparse": lambda x: [x[0], x[1].to_sparse(), x[2]],
    "all sparse": lambda x: [y.to_sparse(2) for y in x],
    "q nested": lambda x: [_quietly(torch.nested.nested_tensor, list(x[0].unbind())), *x[1:]],
    "all jagged": lambda x: [torch.nested.nested_tensor(list(y.unbind()), layout=torch.jagged) for y in x],
    "q on meta": lambda x: [x[0].to("meta"), *x[1:]],
    "all on meta": lambda x: [y.to("meta") for y in x],
}


def _quietly(make, *args):
    """What torch warns of that it may change, or go."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*args)


def _expanded(x):
    """With stride 0 on every dim along which all values are the same."""
    for dim in range(x.dim()):
        first = x.narrow(dim, 0, 1) if x.shape[dim] else x
        if x.shape[dim] > 1 and bool((x == first).all()):
            x = first.expand_as(x)
    return x
