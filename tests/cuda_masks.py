"""What a row sees in CUDA's attention operators, as their C++ computes it: blocks, skips and masks. Forward and
backward are separate. Each function has the expressions of the lines that it names. `tests/sources.json` has copies of
these lines. `tests/unit/test_sources.py` compares them with the headers of the installed torch, and with other sources
if they are given. The results are matrices (rows, columns) that must not be modified.
"""

import functools

import torch

NONE, TOP_LEFT, BOTTOM_RIGHT = range(3)  # the mask types of memory-efficient attention
UINT = 2**32


def _int16(x):
    return (x + 2**15) % 2**16 - 2**15


def _divided(a, b):
    """Division as in C++, rounded towards 0."""
    return a // b if a >= 0 else -(-a // b)


def _ceil_div(a, b):
    return _divided(a + b - 1, b)


def _distances(rows, columns):
    """column - row for a block, both given as ranges."""
    return torch.arange(columns.start, columns.stop) - torch.arange(rows.start, rows.stop)[:, None]


def _span(block, size, end):
    return range(block * size, min((block + 1) * size, end))


def _of(x, rows, columns):
    return x[rows.start : rows.stop, columns.start : columns.stop]


# ---- memory-efficient attention: torch/include/ATen/native/transformers/cuda/mem_eff_attention


@functools.lru_cache(maxsize=256)
def efficient_forward(num_queries, num_keys, kind, window, blocks=(64, 64)):
    """kernel_forward.h: 277 to 291 (offset, keys of a block of queries), 705 (skip), 847 (causal), 879 (window)."""
    height, width = blocks
    sees = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    offset = num_keys - num_queries if kind == BOTTOM_RIGHT else 0  # a uint32_t
    for query_start in range(0, num_queries, height):
        rows = range(query_start, min(query_start + height, num_queries))
        keys = min(query_start + offset + height, num_keys) if kind else num_keys
        for key_start in range(0, keys, width):
            if window > 0 and key_start + width < query_start + offset - window:
                continue
            columns = range(key_start, min(key_start + width, keys))
            distances, shown = _distances(rows, columns), _of(sees, rows, columns)
            shown[:] = True
            if kind and min(key_start + width, keys) >= (query_start + offset) % UINT:
                shown &= distances <= offset
            if window > 0 and (query_start + offset + len(rows) - window) % UINT >= key_start:
                shown &= distances > offset - window
    return sees


class EfficientBackward:
    """kernel_backward.h: the order of blocks, and which of them write dq.

    Args:
        splits: num_splits_key; None for one split per block of keys, as attention_backward.cu chooses in fp32.
    """

    def __init__(self, num_queries, num_keys, kind, window, blocks=(64, 64), splits=None):
        self.num_queries, self.num_keys, self.kind, self.window = num_queries, num_keys, kind, window
        self.height, self.width = blocks  # kBlockSizeI, kBlockSizeJ
        self.splits = splits or -(-num_keys // self.width)
        self.shift = num_keys - num_queries if kind == BOTTOM_RIGHT else 0

    def last_query(self, key_start):
        """2291 to 2294, and 2360 to 2362 again."""
        return min(key_start + self.width, self.num_keys) - 1 - self.shift + self.size - 1

    @property
    def size(self):
        """2288."""
        return self.window or self.num_queries + self.num_keys

    @property
    def query_end(self):
        """getQueryEnd, 2276."""
        return -(-self.num_queries // self.height) * self.height

    def smallest_query(self, key_start):
        """getSmallestQueryForKey, 2281 to 2299."""
        if self.kind == NONE:
            return 0
        first_query = key_start - self.shift
        if self.last_query(key_start) < 0 or first_query >= self.num_queries:
            return self.query_end
        return max(0, first_query) // self.height * self.height

    def next_block(self, query_start, key_start, query_shift):
        """incrIteration, 2335 to 2374."""
        next_query = query_start + self.height
        if query_shift:
            if next_query >= self.num_queries:
                return self.smallest_query(key_start), key_start
            if not query_start < query_shift <= next_query:
                return next_query, key_start
        elif next_query < self.num_queries and (self.window <= 0 or next_query <= self.last_query(key_start)):
            return next_query, key_start
        next_key = key_start + self.splits * self.width
        return self.smallest_query(next_key) + query_shift, next_key

    def writers(self, query_start):
        """getNumParallelBlocksForQuery, 2306 to 2332: how many splits add to a block of dq. The last one writes the
        block."""
        blocks = _int16(-(-self.num_keys // self.width))
        if self.kind != NONE:
            last_query = min(query_start + self.height, self.num_queries) - 1
            last_key = min(last_query + self.shift, self.num_keys - 1)
            first_key = max(query_start - self.window + 1 + self.shift, 0) if self.window else 0
            blocks = _int16(last_key // self.width - (first_key // self.width if self.window else 0) + 1)
            if last_key < 0 or first_key >= self.num_keys:
                blocks = 0
        return min(self.splits, blocks)

    def is_last(self, query_start, key_start):
        """2097 to 2105."""
        next_key = key_start + self.splits * self.width
        return self.num_keys <= next_key or query_start < self.smallest_query(next_key)

    def seen(self, rows, columns):
        """The masks, 1631 to 1670: of a window without num_keys - num_queries."""
        shown, distances = torch.ones(len(rows), len(columns), dtype=torch.bool), _distances(rows, columns)
        if self.kind != NONE:
            shown &= distances <= (self.num_keys - self.num_queries if self.kind == BOTTOM_RIGHT else 0)
        return shown & (distances > -self.window) if self.window > 0 else shown

    def run(self):
        """attention_kernel, 1307 to 1394: (what a row sees, whether its dq is written)."""
        sees = torch.zeros(self.num_queries, self.num_keys, dtype=torch.bool)
        done, written = {}, torch.zeros(self.num_queries, dtype=torch.bool)
        for split in range(self.splits):
            query_shift = split * self.height % self.query_end if self.kind == NONE and self.splits > 1 else 0
            for key_start in range(split * self.width, self.num_keys, self.splits * self.width):
                query_start, next_key = self.smallest_query(key_start) + query_shift, key_start
                while next_key == key_start and query_start < self.num_queries:
                    rows = range(query_start, min(query_start + self.height, self.num_queries))
                    columns = range(key_start, min(key_start + self.width, self.num_keys))
                    _of(sees, rows, columns)[:] = self.seen(rows, columns)
                    if self.is_last(query_start, key_start):
                        done[query_start] = done.get(query_start, 0) + 1
                        if self.splits == 1 or done[query_start] == self.writers(query_start):
                            written[rows.start : rows.stop] = True
                    query_start, next_key = self.next_block(query_start, key_start, query_shift)
        return sees, written


@functools.lru_cache(maxsize=256)
def efficient_backward(num_queries, num_keys, kind, window, blocks=(64, 64), splits=None):
    """(What a row sees, whether its dq is written.)"""
    return EfficientBackward(num_queries, num_keys, kind, window, blocks, splits).run()


# ---- FlashAttention 2: csrc/flash_attn of flash-attention, which torch has a copy of


def _flash_window(max_rows, max_columns, causal, left, right):
    """flash_api.cpp: 422 to 427 and 155 to 162: (causal, local, left, right)."""
    left, right = (-1 if side >= max_columns else side for side in (left, right))
    right = 0 if causal and max_rows > 1 else right
    is_causal, is_local = left < 0 and right == 0, left >= 0 or right > 0
    if left < 0 <= right:
        left = max_columns
    if right < 0 <= left:
        right = max_columns
    return is_causal, is_local, left, right


def _limits(rows, columns, shift, left, right):
    """mask.h: 49 to 50 and 63: of a window."""
    distances = _distances(rows, columns)
    return (distances <= shift + right) & (distances >= shift - left)


@functools.lru_cache(maxsize=1024)
def flash_forward(num_rows, num_columns, max_rows, max_columns, causal, left, right, blocks=(128, 64)):
    """flash_fwd_kernel.h: 90 to 94 (blocks), 305 to 309 (which of them are masked), mask.h."""
    is_causal, is_local, left, right = _flash_window(max_rows, max_columns, causal, left, right)
    height, width = blocks
    shift, sees = num_columns - num_rows, torch.zeros(num_rows, num_columns, dtype=torch.bool)
    even = num_rows % height == num_columns % width == 0
    masked_steps = 1 if not (is_causal or is_local) else _ceil_div(height, width) + (not (even and is_causal))
    for block in range(_ceil_div(num_rows, height)):
        rows = _span(block, height, num_rows)
        low = max(0, _divided(block * height + shift - left, width)) if is_local else 0
        high = _ceil_div(num_columns, width)
        if is_causal or is_local:
            high = min(high, _ceil_div((block + 1) * height + shift + right, width))
        for step, other in enumerate(range(high - 1, low - 1, -1)):
            columns = _span(other, width, num_columns)
            shown = _of(sees, rows, columns)
            shown[:] = True
            if is_local:
                shown &= _limits(rows, columns, shift, left, right)
            elif is_causal and step < masked_steps:
                shown &= _distances(rows, columns) <= shift
            assert step < masked_steps or is_local or len(columns) == width  # otherwise missing keys would count
    return sees


@functools.lru_cache(maxsize=1024)
def flash_backward(num_rows, num_columns, max_rows, max_columns, causal, left, right, blocks=(64, 128)):
    """flash_bwd_kernel.h: 103 to 105 and 318 to 320 (blocks), 504 to 530 (which of them are masked), mask.h; a single
    row has the same causal mask, since line 426 of flash_api.cpp is not in its backward."""
    is_causal, is_local, left, right = _flash_window(2, max_columns, causal, left, right)
    height, width = blocks
    shift, sees = num_columns - num_rows, torch.zeros(num_rows, num_columns, dtype=torch.bool)
    for other in range(_ceil_div(num_columns, width)):
        columns, end = _span(other, width, num_columns), (other + 1) * width
        high = _ceil_div(num_rows, height)
        if is_local:
            high = min(high, _ceil_div(end - shift + left, height))
        low = max(0, _divided(other * width - shift - right, height)) if is_causal or is_local else 0
        for block in range(low, high):
            rows = _span(block, height, num_rows)
            shown = _of(sees, rows, columns)
            shown[:] = True
            if is_causal and (block * height < end - shift or end >= num_columns):
                shown &= _distances(rows, columns) <= shift
            right_edge, left_edge = end - shift - right, other * width - shift + left
            if is_local and (block * height < right_edge or (block + 1) * height >= left_edge or end >= num_columns):
                shown &= _limits(rows, columns, shift, left, right)
    return sees


# ---- FlashAttention 3: hopper of flash-attention


def _flash_3_window(max_rows, max_columns, causal, left, right):
    """flash_api.cpp: 796 to 805 and 1360 to 1365, 148 to 153: (causal, local, left, right)."""
    left, right = -1 if left >= max_columns - 1 else left, -1 if right >= max_rows - 1 else right
    right = 0 if causal else right
    is_causal = left < 0 and right == 0
    is_local = (left >= 0 or right >= 0) and not is_causal
    return is_causal, is_local, left if left >= 0 else max_columns - 1, right if right >= 0 else max_rows - 1


@functools.lru_cache(maxsize=1024)
def flash_3_forward(num_rows, num_columns, max_rows, max_columns, causal, left, right, blocks=(128, 128)):
    """block.h: 14 to 41 (blocks), 95 to 131 (where masks begin and end); mask.h: 79 to 117;
    mainloop_fwd_sm90_tma_gmma_ws.hpp: 1307 to 1333."""
    is_causal, is_local, left, right = _flash_3_window(max_rows, max_columns, causal, left, right)
    height, width = blocks
    shift, sees = num_columns - num_rows, torch.zeros(num_rows, num_columns, dtype=torch.bool)
    for block in range(_ceil_div(num_rows, height)):
        rows, edge = _span(block, height, num_rows), (block + 1) * height + shift
        high = _ceil_div(num_columns, width)
        if is_causal or is_local:
            high = min(high, _ceil_div(edge + right * is_local, width))
        low = max(0, _divided(block * height + shift - left, width)) if is_local else 0
        masked_from = max(low, _divided(block * height + shift + right * is_local, width))
        masked_below = max(low, _ceil_div(edge - left, width)) if is_local else low
        for other in range(high - 1, low - 1, -1):
            columns = _span(other, width, num_columns)
            first = other == high - 1
            shown = _of(sees, rows, columns)
            shown[:] = True
            if is_causal and (first or other >= masked_from):
                shown &= _distances(rows, columns) <= shift
            if is_local and (first or other >= masked_from or other < masked_below):
                shown &= _limits(rows, columns, shift, left, right)
            assert first or len(columns) == width
    return sees


@functools.lru_cache(maxsize=1024)
def flash_3_backward(num_rows, num_columns, max_rows, max_columns, causal, left, right, blocks=(128, 128)):
    """block.h: 73 to 92 (blocks); mask.h: 134 to 152; mainloop_bwd_sm90_tma_gmma_ws.hpp: 1005 to 1033 (which of them
    are masked, of heads of at most 64)."""
    is_causal, is_local, left, right = _flash_3_window(max_rows, max_columns, causal, left, right)
    height, width = blocks
    shift, sees = num_columns - num_rows, torch.zeros(num_rows, num_columns, dtype=torch.bool)
    right = 0 if is_causal else right
    for other in range(_ceil_div(num_columns, width)):
        columns, end = _span(other, width, num_columns), (other + 1) * width
        high = _ceil_div(num_rows, height)
        if is_local:
            high = min(high, _ceil_div(end - shift + left, height))
        low = max(0, _divided(other * width - shift - right, height)) if is_causal or is_local else 0
        masked_below = min(high, _divided(end - 1 - shift - right, height) + 1)
        masked_from = min(high, _divided(other * width - shift + left, height)) if is_local else high
        for block in range(low, high):
            rows = _span(block, height, num_rows)
            shown = _of(sees, rows, columns)
            shown[:] = True
            if is_causal and block < masked_below:
                shown &= _distances(rows, columns) <= shift
            if is_local and (block < masked_below or block >= masked_from):
                shown &= _limits(rows, columns, shift, left, right)
    return sees
