"""Triton kernels for decoding on a GPU: attention of one token a row, and the draw of the next token.

Each computes what plain torch does where there are no kernels: `shared_prefix._attend` and `sampling.sample_tokens`. Attention is
divided between programs over the context (Dao et al. 2023, Flash-Decoding): each leaves a maximum, a sum and a weighted sum of
values, which a second kernel combines. TRITON_INTERPRET=1 runs all of them on a CPU, slowly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ATTENTION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_WIDTH = 256  # of a head: a wider one's block of keys does not fit a multiprocessor's memory
_PROGRAMS = 512  # that a GPU is kept busy with
_MOST_SPLITS = 32  # of a context
_LEAST_SPLIT = 128  # columns that are worth a program
_CHUNK = 1024  # logits that are summed at a time


def attend_once(
    query: Tensor,
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]],
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Return [N, H·G, Dv]: softmax(scale · q kᵀ) v of one token per row, over the columns of several parts at once.

    Args:
        query: [N, H·G, D] with G query heads for each head of keys.
        parts: Of each: keys [C, H, L, D] and values [C, H, L, Dv]; the rows [C, most] int32 that see each of its C texts, −1 where
            there are fewer; and for each row [N] int32 the first column that it sees and the one after the last.
        sinks: [H·G] scores that take a share of the softmax and give nothing.
    """
    rows, query_heads, width = query.shape
    query = query.contiguous()
    splits = [_count_splits(keys, of_rows.shape[1]) for keys, _, of_rows, _, _ in parts]
    count, value_width = sum(n for n, _ in splits), parts[0][1].shape[-1]
    partial = query.new_empty(count, rows, query_heads, value_width, dtype=torch.float32)
    largest, total = (query.new_empty(count, rows, query_heads, dtype=torch.float32) for _ in range(2))
    precision = "ieee" if query.dtype == torch.float32 else "tf32"  # which half precision does not read
    begin = 0
    for (keys, values, of_rows, first, last), (number, size) in zip(parts, splits, strict=True):
        texts, heads, columns, _ = keys.shape
        each, most = query_heads // heads, of_rows.shape[1]
        block = min(64, max(16, triton.next_power_of_2(most * each)))
        splits_of_part = slice(begin, begin + number)
        _attend_part[(texts * heads, triton.cdiv(most * each, block), number)](
            query,
            keys,
            values,
            of_rows,
            first,
            last,
            partial[splits_of_part],
            largest[splits_of_part],
            total[splits_of_part],
            *keys.stride()[:3],
            *values.stride()[:3],
            rows,
            heads,
            most,
            columns,
            scale,
            EACH=each,
            WIDTH=width,
            VALUE_WIDTH=value_width,
            BLOCK_WIDTH=max(16, triton.next_power_of_2(width)),
            BLOCK_VALUE=max(16, triton.next_power_of_2(value_width)),
            BLOCK_ROWS=block,
            BLOCK_COLUMNS=_columns_at_a_time(query.dtype, max(width, value_width)),
            SPLIT=size,
            PRECISION=precision,
        )
        begin += number
    out = query.new_empty(rows, query_heads, value_width)
    _combine_parts[(rows * query_heads,)](
        partial,
        largest,
        total,
        out if sinks is None else sinks,
        out,
        count,
        rows,
        query_heads,
        HAS_SINKS=sinks is not None,
        VALUE_WIDTH=value_width,
        BLOCK_VALUE=triton.next_power_of_2(value_width),
        BLOCK_SPLITS=triton.next_power_of_2(count),
    )
    return out


def _columns_at_a_time(dtype: torch.dtype, width: int) -> int:
    """Return how many keys and values fit a multiprocessor's memory beside the queries."""
    return max(16, min(64, 64 * 256 // int(triton.next_power_of_2(dtype.itemsize * width))))


def _count_splits(keys: Tensor, most: int) -> tuple[int, int]:
    """Return into how many parts the columns are divided, and the columns of each, a power of two.

    They depend on shapes alone, so that a captured graph can be replayed while more columns are used.
    """
    texts, heads, columns, _ = keys.shape
    split_count = min(_MOST_SPLITS, max(1, _PROGRAMS // (texts * heads * max(1, most // 16))))
    size = max(_LEAST_SPLIT, triton.next_power_of_2(triton.cdiv(columns, split_count)))
    return triton.cdiv(columns, size), size


def draw_tokens(logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample by inverting the cumulative distribution at u: the tokens [N] and log-probabilities [N], in one pass over logits.

    A row whose logits are no distribution gets some token and a log-probability that is not finite.

    Args:
        logits: [N, V].
        u: [N] float64 in [0, 1), far enough below 1 that rounding does not make it 1.
    """
    rows, size = logits.shape
    chunks = triton.cdiv(size, _CHUNK)
    largest = logits.new_empty(rows, chunks, dtype=torch.float32)
    total = logits.new_empty(rows, chunks, dtype=torch.float64)
    _sum_chunks[(rows, chunks)](
        logits, largest, total, logits.stride(0), size, chunks, float(temperature), CHUNK=_CHUNK
    )
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logp = logits.new_empty(rows, dtype=torch.float32)
    _draw[(rows,)](
        logits,
        largest,
        total,
        u.contiguous(),
        token,
        logp,
        logits.stride(0),
        size,
        chunks,
        float(temperature),
        CHUNK=_CHUNK,
        BLOCK_CHUNKS=triton.next_power_of_2(chunks),
    )
    return token, logp


@triton.jit
def _attend_part(
    query,
    keys,
    values,
    of_rows,
    first,
    last,
    partial,
    largest,
    total,
    key_text,
    key_head,
    key_column,
    value_text,
    value_head,
    value_column,
    rows,
    heads,
    most,
    columns,
    scale,
    EACH: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend from some rows of one text, with all query heads of one head of keys, to `SPLIT` of the text's columns."""
    text, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    split = tl.program_id(2)
    place = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = tl.load(of_rows + text * most + place // EACH, mask=place // EACH < most, other=-1).to(tl.int64)
    exists = row >= 0
    at = row * heads * EACH + head * EACH + place % EACH  # of [N, H·G]
    d, e = tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_VALUE)
    q = tl.load(query + at[:, None] * WIDTH + d[None], mask=exists[:, None] & (d < WIDTH)[None], other=0.0)
    low = tl.load(first + row, mask=exists, other=columns)
    high = tl.load(last + row, mask=exists, other=0)
    begin = tl.maximum(split * SPLIT, tl.min(low, 0) // BLOCK_COLUMNS * BLOCK_COLUMNS)
    end = tl.minimum(tl.minimum((split + 1) * SPLIT, tl.max(high, 0)), columns)
    text_keys = keys + text.to(tl.int64) * key_text + head * key_head
    text_values = values + text.to(tl.int64) * value_text + head * value_head
    top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_ROWS,), tl.float32)
    out = tl.zeros((BLOCK_ROWS, BLOCK_VALUE), tl.float32)
    for start in range(begin, end, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        k = tl.load(
            text_keys + column[None] * key_column + d[:, None],
            mask=(column < end)[None] & (d < WIDTH)[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        sees = (column[None] >= low[:, None]) & (column[None] < high[:, None]) & (column < end)[None]
        scores = tl.where(sees, scores, float("-inf"))
        larger = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(larger == float("-inf"), 0.0, larger)  # of no column yet
        p = tl.exp(scores - finite[:, None])
        shrink = tl.exp(top - finite)
        weight = weight * shrink + tl.sum(p, 1)
        v = tl.load(
            text_values + column[:, None] * value_column + e[None],
            mask=(column < end)[:, None] & (e < VALUE_WIDTH)[None],
            other=0.0,
        )
        out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = larger
    at += split.to(tl.int64) * rows * heads * EACH
    tl.store(largest + at, top, mask=exists)
    tl.store(total + at, weight, mask=exists)
    tl.store(partial + at[:, None] * VALUE_WIDTH + e[None], out, mask=exists[:, None] & (e < VALUE_WIDTH)[None])


@triton.jit
def _combine_parts(
    partial,
    largest,
    total,
    sinks,
    out,
    count,
    rows,
    heads,
    HAS_SINKS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Combine what the programs of one row and query head have left."""
    program = tl.program_id(0).to(tl.int64)
    split, e = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_VALUE)
    at = split.to(tl.int64) * rows * heads + program
    tops = tl.load(largest + at, mask=split < count, other=float("-inf"))
    weights = tl.load(total + at, mask=split < count, other=0.0)
    top = tl.max(tops, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + program % heads).to(tl.float32)
        top = tl.maximum(top, sink)
    shrink = tl.exp(tops - top)
    sum_of_weights = tl.sum(weights * shrink, 0)
    if HAS_SINKS:
        sum_of_weights += tl.exp(sink - top)
    values = tl.load(
        partial + at[:, None] * VALUE_WIDTH + e[None],
        mask=(split < count)[:, None] & (e < VALUE_WIDTH)[None],
        other=0.0,
    )
    mixed = tl.sum(values * shrink[:, None], 0) / sum_of_weights
    tl.store(out + program * VALUE_WIDTH + e, mixed.to(out.dtype.element_ty), mask=e < VALUE_WIDTH)


@triton.jit
def _sum_chunks(logits, largest, total, stride, size, chunks, temperature, CHUNK: tl.constexpr):
    """Leave a chunk's largest logit and Σ exp(logit − largest)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + place, mask=place < size, other=float("-inf")).to(tl.float32) / temperature
    top = tl.max(x, 0)
    weights = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
    tl.store(largest + row * chunks + chunk, top)
    tl.store(total + row * chunks + chunk, tl.sum(weights.to(tl.float64), 0))


@triton.jit
def _draw(
    logits,
    largest,
    total,
    uniforms,
    tokens,
    logps,
    stride,
    size,
    chunks,
    temperature,
    CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """Find the chunk in which a row's cumulative weight exceeds u, and the token in it."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK_CHUNKS)
    tops = tl.load(largest + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    top = tl.max(tops, 0)
    sums = tl.load(total + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    cumulative = tl.cumsum(sums * tl.exp(tops - top).to(tl.float64), 0)
    sum_of_weights = tl.sum(tl.where(chunk == chunks - 1, cumulative, 0.0), 0)
    target = tl.load(uniforms + row) * sum_of_weights
    chunk_index = tl.sum(((cumulative <= target) & (chunk < chunks)).to(tl.int32), 0)
    chunk_index = tl.minimum(chunk_index, chunks - 1)
    target -= tl.sum(tl.where(chunk == chunk_index - 1, cumulative, 0.0), 0)
    inside = tl.arange(0, CHUNK)
    place = chunk_index * CHUNK + inside
    x = tl.load(logits + row * stride + place, mask=place < size, other=float("-inf")).to(tl.float32) / temperature
    weights = tl.exp(x - top)
    offset = tl.sum((tl.cumsum(weights.to(tl.float64), 0) <= target).to(tl.int32), 0)
    last = tl.max(tl.where(weights > 0, inside, 0), 0)  # a chunk's two sums may differ in the last bits
    offset = tl.minimum(offset, last)
    chosen = tl.sum(tl.where(inside == offset, x, 0.0), 0)
    tl.store(tokens + row, (chunk_index * CHUNK + offset).to(tl.int64))
    tl.store(logps + row, (chosen.to(tl.float64) - top - tl.log(sum_of_weights)).to(tl.float32))
