"""What the tests of this folder do on a rank."""

from ds_seqpar import SeqParError, SequenceParallel, SequenceParallelConfig


def make(heads=None, **config):
    """SequenceParallel from config fields."""
    return SequenceParallel(SequenceParallelConfig(**config), heads=heads)


def leaves(sp, *whole):
    """This rank's tokens of global (batch, seq, ...) tensors, as leaves that want gradients."""
    return [sp.shard(x, 1).requires_grad_() for x in whole]


def attend(sp, q, k, v, do, causal=True, scale=None):
    """Global (out, dq, dk, dv) from global inputs, each rank working on its own tokens."""
    local = leaves(sp, q, k, v)
    out = sp.attention(*local, causal=causal, scale=scale)
    out.backward(sp.shard(do, 1))
    return [sp.gather(x.detach(), 1) for x in (out, *(x.grad for x in local))]


def refusal(function, *args, **kwargs):
    """(kind, message) of the SeqParError that a call raises on this rank; (None, None) where it raises none."""
    try:
        function(*args, **kwargs)
    except SeqParError as error:
        return type(error).__name__, str(error)
    return None, None
