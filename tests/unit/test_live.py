"""The meter of memory sees what is there, inside ops too, and only as long as it is there."""

import threading

import torch

from tests import live

UNIT = 4096


def _block():
    return torch.ones(UNIT, dtype=torch.uint8)


@torch.library.custom_op("ds_seqpar::tests_sum_of_two", mutates_args=())
def sum_of_two(x: torch.Tensor) -> torch.Tensor:
    first = x + 1
    return first + (x + 2)


def test_what_an_op_makes_and_drops_is_seen():
    x = _block()
    with live.Live(x) as meter:
        result = sum_of_two(x)
        assert meter.peak == 3 * UNIT  # both terms and their sum
        assert meter.bytes() == UNIT
        meter.restart()
        assert meter.peak == UNIT
        view = result[1:].view(3, -1)
        del result
        assert meter.bytes() == UNIT
        del view
        assert meter.bytes() == 0


def test_inputs_and_what_is_written_into_them_do_not_count():
    x = _block()
    with live.Live(x) as meter:
        x.add_(1)
        x[1:].view(-1).mul_(2)
        assert meter.peak == 0
        x = x + 1  # nobody else has the old one: its memory may be given to what comes next
        for _ in range(8):
            y = _block()
        assert meter.bytes() == 2 * UNIT
        del x, y
        assert meter.settled() == 0


def test_what_another_thread_holds_counts_until_it_lets_go():
    hold, held = threading.Event(), [None]
    with live.Live() as meter:
        held[0] = _block()
        thread = threading.Thread(target=lambda: (hold.wait(), held.clear()))
        thread.start()
        assert meter.settled() == UNIT
        hold.set()
        thread.join()
        assert meter.settled() == 0


def test_a_kernel_alone():
    """Forward makes out and the log-sum-exp, one fp32 a row; backward the three gradients beside them."""
    blocks = [torch.randn(1, 32, 2, 16).bfloat16() for _ in range(4)]
    unit = blocks[0].numel() * 2
    found = live.measure(_kernel, *blocks)
    lse = unit // 16 * 2
    assert found == live.Figures(
        forward=unit + lse, kept=unit + lse, backward=4 * unit + lse, gradients=3 * unit, left=0
    )


def _kernel(*tensors):
    parts = (x.transpose(1, 2) for x in tensors)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts, is_causal=True)[0].transpose(1, 2)
