"""The compiled forward: runs a program's operations, each by all threads, then a barrier.

Whatever an operation computes for a token depends on that token, on what its request holds, and on
the weights: never on the other tokens of the forward, their number, or the number of threads. That
is what makes speculative output equal to plain decoding bit for bit. Operations divide their work
among threads by outputs or by tokens, never within a sum.

Legend: N tokens, B batch rows, S slots, D head size, E experts, K experts per token.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import njit
from numba import types as numba_types

from specgym.engine.compiled.layout import (
    OP_WORDS,
    Attend,
    Epilogue,
    Experts,
    Job,
    Linear,
    Op,
    Place,
    Rotate,
    Token,
)
from specgym.engine.compiled.memory import LINE, barrier, take, word
from specgym.engine.compiled.tiles import BFLOAT16, MAX_BLOCKS, product, tiles_of
from specgym.engine.compiled.vectors import (
    F32,
    I32,
    LANES,
    add,
    divide,
    exp,
    fma,
    larger,
    largest_lane,
    load,
    load_bf16,
    load_f32,
    load_i32,
    load_i64,
    load_u8,
    make_operation,
    multiply,
    put_lane,
    silu,
    splat,
    store,
    store_bf16,
    store_f32,
    store_i32,
    store_i64,
    sum_lanes,
    take_lane,
)

types: Any = numba_types
TILE_WIDTH = MAX_BLOCKS * LANES
as_float = make_operation(
    types.float32, [types.int64], lambda b, bits: b.bitcast(b.trunc(bits, I32), F32)
)
square_root = make_operation(
    types.float32,
    [types.float32],
    lambda b, x: b.call(b.module.declare_intrinsic("llvm.sqrt", [ir.FloatType()]), [x]),
)
LOWEST = types.float32(-math.inf)


@njit
def buffer_row(job, buffer, row):
    """Return the address of a row of a buffer."""
    entry = word(job, Job.BUFFERS) + 16 * buffer
    return load_i64(entry) + load_i64(entry + 8) * row


@njit
def token_word(job, token, which):
    """Return a word of a token."""
    return load_i64(word(job, Job.TOKENS) + 8 * (Token.SIZE * token + which))


@njit
def own(job, thread, offset):
    """Return an address in a thread's own memory."""
    private = word(job, Job.PRIVATE) + word(job, Job.PRIVATE_BYTES) * thread
    return private + word(job, offset)


@njit
def share_of(count, thread, num_threads):
    """Return the first and the end of a thread's share of some items."""
    return count * thread // num_threads, count * (thread + 1) // num_threads


@njit
def read_state(address, kind):
    """Return 16 numbers of a type as float32."""
    if kind == BFLOAT16:
        return load_bf16(address)
    return load(address)


@njit
def write_state(address, kind, value):
    """Store 16 float32 numbers as a type."""
    if kind == BFLOAT16:
        store_bf16(address, value)
    else:
        store(address, value)


@njit
def normalize(source, target, weight, size, epsilon):
    """Write the RMS norm of a vector; its length in numbers is a multiple of 16."""
    total = splat(types.float32(0.0))
    for i in range(0, 4 * size, 4 * LANES):
        x = load(source + i)
        total = fma(x, x, total)
    mean = sum_lanes(total) / types.float32(size)
    root = splat(types.float32(1.0) / square_root(mean + epsilon))
    for i in range(0, 4 * size, 4 * LANES):
        store(target + i, multiply(multiply(load(source + i), root), load(weight + i)))


@njit
def list_rows(job, op, thread):
    """Norm the rows a linear reads, where it does; returns how many there are.

    Every thread does all of them: that costs less than waiting for the others.
    """
    inputs, norm = word(op, Linear.INPUTS), word(op, Linear.NORM)
    source, second = word(op, Linear.SOURCE), word(op, Linear.SECOND_SOURCE)
    rows, normed = own(job, thread, Job.ROWS), own(job, thread, Job.NORMED)
    only_wanted = word(op, Linear.WANTED_ONLY)
    count = word(job, Job.NUM_WANTED) if only_wanted else word(job, Job.NUM_TOKENS)
    epsilon = as_float(word(op, Linear.EPSILON))
    for i in range(count):
        token = load_i64(word(job, Job.WANTED) + 8 * i) if only_wanted else i
        row = buffer_row(job, source, token)
        if norm:
            width = inputs // 2 if second >= 0 else inputs
            target = normed + 4 * inputs * i
            normalize(row, target, norm, width, epsilon)
            if second >= 0:
                other = buffer_row(job, second, token)
                weight = word(op, Linear.SECOND_NORM)
                normalize(other, target + 4 * width, weight, width, epsilon)
            row = target
        store_i64(rows + 8 * i, row)
    return count


@njit
def linear(job, op, thread, counters):
    """Run a linear operation."""
    count = list_rows(job, op, thread)
    rows, out = own(job, thread, Job.ROWS), own(job, thread, Job.TILE)
    num_blocks, stride = word(op, Linear.NUM_BLOCKS), word(op, Linear.STRIDE)
    weights, kind = word(op, Linear.WEIGHTS), word(op, Linear.KIND)
    inputs, num_threads = word(op, Linear.INPUTS), word(job, Job.NUM_THREADS)
    num_tiles = tiles_of(count)
    block, stop = take(counters, thread, num_threads, num_blocks, MAX_BLOCKS)
    while stop:
        place = weights + stride * block
        for tile in range(num_tiles):
            first, end = share_of(count, tile, num_tiles)
            here = rows + 8 * first
            product(kind, place, stride, stop - block, here, end - first, inputs, out, num_tiles)
            finish(job, op, out, first, end - first, block, stop - block)
        block, stop = take(counters, thread, num_threads, num_blocks, MAX_BLOCKS)


@njit
def finish(job, op, tile, first_row, num_rows, first_block, num_blocks):
    """Hand a tile of outputs on: bias, then the operation's epilogue."""
    bias, epilogue = word(op, Linear.BIAS), word(op, Linear.EPILOGUE)
    target = word(op, Linear.TARGET)
    outputs = word(op, Linear.OUTPUTS)
    only_wanted, scale = word(op, Linear.WANTED_ONLY), word(op, Linear.SCALE)
    for i in range(num_rows):
        row = first_row + i
        line = tile + 4 * TILE_WIDTH * i
        if bias:
            for block in range(num_blocks):
                place = line + 4 * LANES * block
                offset = 4 * LANES * (first_block + block)
                store(place, add(load(place), load(bias + offset)))
        if only_wanted:
            out = load_i64(word(job, Job.WANTED) + 8 * (word(job, Job.NUM_WANTED) + row))
        else:
            out = buffer_row(job, target, row)
        if epilogue == Epilogue.GATE:
            for block in range(0, num_blocks, 2):
                gate = load(line + 4 * LANES * block)
                up = load(line + 4 * LANES * (block + 1))
                store(out + 2 * LANES * (first_block + block), multiply(silu(gate), up))
        elif epilogue == Epilogue.ADD:
            factor = splat(types.float32(1.0))
            if scale >= 0:
                factor = sigmoid_of(buffer_row(job, scale, row))
            for block in range(num_blocks):
                place = out + 4 * LANES * (first_block + block)
                value = load(line + 4 * LANES * block)
                if scale >= 0:
                    value = multiply(factor, value)
                store(place, add(load(place), value))
        else:
            for block in range(num_blocks):
                start = LANES * (first_block + block)
                place = line + 4 * LANES * block
                if start + LANES <= outputs:
                    store(out + 4 * start, load(place))
                else:
                    for lane in range(outputs - start):
                        store_f32(out + 4 * (start + lane), load_f32(place + 4 * lane))


@njit
def sigmoid_of(address):
    """Return the sigmoid of a number in memory, in all lanes."""
    one = splat(types.float32(1.0))
    return divide(one, add(one, exp(splat(-load_f32(address)))))


@njit
def embed(job, op, thread, num_threads):
    """Copy tokens' rows of the embedding."""
    size, kind = word(op, Place.SIZE), word(op, Place.KIND)
    num_bytes = 2 if kind == BFLOAT16 else 4
    first, stop = share_of(word(job, Job.NUM_TOKENS), thread, num_threads)
    for token in range(first, stop):
        source = word(op, Place.SOURCE) + num_bytes * size * token_word(job, token, Token.ID)
        target = buffer_row(job, word(op, Place.TARGET), token)
        for i in range(0, size, LANES):
            store(target + 4 * i, read_state(source + num_bytes * i, kind))


@njit
def keep(job, op, thread, num_threads):
    """Write a buffer's rows to the features of their tokens' slots."""
    size, kind = word(op, Place.SIZE), word(op, Place.KIND)
    num_bytes = 2 if kind == BFLOAT16 else 4
    first, stop = share_of(word(job, Job.NUM_TOKENS), thread, num_threads)
    for token in range(first, stop):
        slot = token_word(job, token, Token.ROW) * word(job, Job.NUM_SLOTS)
        slot += token_word(job, token, Token.SLOT)
        column = slot * word(op, Place.WIDTH) + word(op, Place.COLUMN)
        target = word(job, Job.FEATURES) + num_bytes * column
        source = buffer_row(job, word(op, Place.SOURCE), token)
        if word(op, Place.NORM):
            normed = own(job, thread, Job.NORMED)
            normalize(source, normed, word(op, Place.NORM), size, as_float(word(op, Place.EPSILON)))
            source = normed
        for i in range(0, size, LANES):
            write_state(target + num_bytes * i, kind, load(source + 4 * i))


@njit
def head_norm_factor(source, size, epsilon):
    """Return one over the root mean square of a vector, read number by number."""
    total = types.float32(0.0)
    for i in range(size):
        x = load_f32(source + 4 * i)
        total += x * x
    return types.float32(1.0) / square_root(total / types.float32(size) + epsilon)


@njit
def clip_values(row, size, bound):
    """Clip numbers in place."""
    for i in range(size):
        x = load_f32(row + 4 * i)
        store_f32(row + 4 * i, min(max(x, -bound), bound))


@njit
def rotate(job, op, thread, num_threads):
    """Norm and rotate queries and keys of a token, and write keys and values to its slot."""
    heads, kv_heads = word(op, Rotate.HEADS), word(op, Rotate.KV_HEADS)
    per_token = heads + 2 * kv_heads
    count = word(job, Job.NUM_TOKENS)
    if word(op, Rotate.WIDE_NORM):  # all heads of a token by one thread: it norms them in place
        first, stop = share_of(count, thread, num_threads)
        for token in range(first, stop):
            norm_wide(job, op, token)
            for head in range(per_token):
                rotate_head(job, op, token, head)
        return
    first, stop = share_of(count * per_token, thread, num_threads)
    for item in range(first, stop):
        rotate_head(job, op, item // per_token, item % per_token)


@njit
def norm_wide(job, op, token):
    """Norm all queries of a token as one vector, and all keys, in place; then clip (OLMoE)."""
    size = word(op, Rotate.HEAD_SIZE)
    queries, keys = word(op, Rotate.HEADS) * size, word(op, Rotate.KV_HEADS) * size
    epsilon = as_float(word(op, Rotate.EPSILON))
    row = buffer_row(job, word(op, Rotate.SOURCE), token)
    for part in range(2):
        start = row + 4 * queries * part
        length = keys if part else queries
        weight = word(op, Rotate.KEY_WIDE_NORM) if part else word(op, Rotate.WIDE_NORM)
        factor = head_norm_factor(start, length, epsilon)
        for i in range(length):
            x = load_f32(start + 4 * i) * factor
            store_f32(start + 4 * i, x * load_f32(weight + 4 * i))
    clip = as_float(word(op, Rotate.CLIP))
    if clip > 0.0:
        clip_values(row, queries + 2 * keys, clip)


@njit
def rotate_head(job, op, token, head):
    """Rotate one head of a token, or pass a value on; to the queries or the cache."""
    heads, kv_heads = word(op, Rotate.HEADS), word(op, Rotate.KV_HEADS)
    size, padded = word(op, Rotate.HEAD_SIZE), word(op, Rotate.PADDED_SIZE)
    half = size // 2
    source = buffer_row(job, word(op, Rotate.SOURCE), token) + 4 * size * head
    weight = word(op, Rotate.HEAD_NORM) if head < heads else word(op, Rotate.KEY_HEAD_NORM)
    is_value = head >= heads + kv_heads
    if weight and not is_value:
        factor = head_norm_factor(source, size, as_float(word(op, Rotate.EPSILON)))
        for i in range(size):
            x = load_f32(source + 4 * i) * factor
            store_f32(source + 4 * i, x * load_f32(weight + 4 * i))
    if not is_value:
        cosines = word(job, Job.ROTARY) + 4 * size * token_word(job, token, Token.POSITION)
        sines = cosines + 4 * half
        for i in range(half):
            left, right = load_f32(source + 4 * i), load_f32(source + 4 * (half + i))
            c, s = load_f32(cosines + 4 * i), load_f32(sines + 4 * i)
            store_f32(source + 4 * i, left * c - right * s)
            store_f32(source + 4 * (half + i), right * c + left * s)
    if head < heads:
        target = buffer_row(job, word(op, Rotate.TARGET), token) + 4 * padded * head
        kind = 1
    else:
        group = (head - heads) % kv_heads
        kind = word(op, Rotate.KIND)
        cache = word(job, Job.CACHES) + 16 * word(op, Rotate.LAYER) + (8 if is_value else 0)
        place = token_word(job, token, Token.ROW) * kv_heads + group
        place = place * word(job, Job.NUM_SLOTS) + token_word(job, token, Token.SLOT)
        target = load_i64(cache) + (2 if kind == BFLOAT16 else 4) * padded * place
    num_bytes = 2 if kind == BFLOAT16 else 4
    for i in range(0, size - size % LANES, LANES):
        write_state(target + num_bytes * i, kind, load(source + 4 * i))
    if size % LANES:
        write_tail(target, source, size, kind)


@njit
def write_tail(target, source, size, kind):
    """Write the numbers of a head behind the last full vector, then zeros up to the next."""
    done = size - size % LANES
    tail = splat(types.float32(0.0))
    for lane in range(size - done):
        tail = put_lane(tail, lane, load_f32(source + 4 * (done + lane)))
    num_bytes = 2 if kind == BFLOAT16 else 4
    write_state(target + num_bytes * done, kind, tail)


@njit
def list_slots(job, op, token, slots):
    """List the slots a token attends to, ascending; returns how many."""
    num_slots, mask = word(job, Job.NUM_SLOTS), word(job, Job.MASK)
    last = token_word(job, token, Token.SLOT)
    count = 0
    if mask:
        row = mask + num_slots * token
        for slot in range(num_slots):
            store_i64(slots + 8 * count, slot)
            count += load_u8(row + slot) != 0
        return count
    start, sliding = token_word(job, token, Token.START), word(op, Attend.SLIDING)
    row = num_slots * token_word(job, token, Token.ROW)
    valid = word(job, Job.VALID) + row
    for slot in range(start):
        store_i64(slots + 8 * count, slot)
        count += load_u8(valid + slot) != 0
    for slot in range(start, last + 1):
        store_i64(slots + 8 * count, slot)
        count += 1
    if sliding:
        first = token_word(job, token, Token.POSITION) - sliding + 1
        position = token_word(job, token, Token.POSITION) - count + 1
        num_far = max(first - position, 0)  # visible tokens stand at consecutive positions
        for i in range(num_far, count):
            store_i64(slots + 8 * (i - num_far), load_i64(slots + 8 * i))
        count -= num_far
    return count


@njit
def attend(job, op, thread, num_threads, counters):
    """Mix values for each token and group of heads."""
    heads, kv_heads = word(op, Attend.HEADS), word(op, Attend.KV_HEADS)
    together = heads // kv_heads
    count = word(job, Job.NUM_TOKENS)
    if count * kv_heads < 4 * num_threads:  # too few items: a head each
        together = 1
    parts = heads // together
    last = types.int64(-1)
    num_listed = types.int64(0)
    slots = own(job, thread, Job.SLOTS)
    item, stop = take(counters, thread, num_threads, count * parts, 2)
    while stop:
        for i in range(item, stop):
            token = i // parts
            if token != last:
                num_listed = list_slots(job, op, token, slots)
                last = token
            first = (i % parts) * together
            for head in range(first, first + together):
                attend_head(job, op, thread, token, head, slots, num_listed)
        item, stop = take(counters, thread, num_threads, count * parts, 2)


@njit
def attend_head(job, op, thread, token, head, slots, count):
    """Mix the values that one query attends to: softmax(q k / scale) v, slots ascending."""
    padded, kind = word(op, Attend.PADDED_SIZE), word(op, Attend.KIND)
    group = head * word(op, Attend.KV_HEADS) // word(op, Attend.HEADS)
    cache = word(job, Job.CACHES) + 16 * word(op, Attend.LAYER)
    place = token_word(job, token, Token.ROW) * word(op, Attend.KV_HEADS) + group
    num_bytes = (2 if kind == BFLOAT16 else 4) * padded
    offset = place * word(job, Job.NUM_SLOTS) * num_bytes
    keys, values = load_i64(cache) + offset, load_i64(cache + 8) + offset
    query = buffer_row(job, word(op, Attend.SOURCE), token) + 4 * padded * head
    scores = own(job, thread, Job.SCORES)
    if kind == BFLOAT16:
        score_slots_bf16(query, keys, num_bytes, padded, slots, count, scores)
    else:
        score_slots_f32(query, keys, num_bytes, padded, slots, count, scores)
    total = weigh_scores(scores, count, as_float(word(op, Attend.SCALE)))
    size = word(op, Attend.HEAD_SIZE)
    target = buffer_row(job, word(op, Attend.TARGET), token) + 4 * size * head
    if kind == BFLOAT16:
        mix_slots_bf16(values, num_bytes, size, slots, count, scores, total, target)
    else:
        mix_slots_f32(values, num_bytes, size, slots, count, scores, total, target)


@njit
def weigh_scores(scores, count, scale):
    """Turn scores into exp(scale * (score - largest)) in place; returns their sum."""
    for i in range(count, count + LANES):
        store_f32(scores + 4 * i, LOWEST)
    top = splat(LOWEST)
    for i in range(0, count, LANES):
        top = larger(load(scores + 4 * i), top)
    shift = splat(-largest_lane(top))
    factor = splat(scale)
    total = splat(types.float32(0.0))
    for i in range(0, count, LANES):
        weight = exp(multiply(factor, add(load(scores + 4 * i), shift)))
        store(scores + 4 * i, weight)
        total = add(total, weight)
    return sum_lanes(total)


def make_attention(read):
    """Make what scores slots and what mixes their values, for caches that ``read`` reads."""

    @njit
    def score_slots(query, keys, num_bytes, padded, slots, count, scores):
        step = num_bytes // padded
        for i in range(count):
            key = keys + num_bytes * load_i64(slots + 8 * i)
            total = splat(types.float32(0.0))
            for d in range(0, padded, LANES):
                total = fma(load(query + 4 * d), read(key + step * d), total)
            store_f32(scores + 4 * i, sum_lanes(total))

    @njit
    def mix_slots(values, num_bytes, size, slots, count, weights, total, target):
        width = -(-size // LANES) * LANES
        step = num_bytes // width
        norm = splat(total)
        for d in range(0, width, 4 * LANES):
            if d + 4 * LANES <= size:
                mix_four(
                    values + step * d, num_bytes, step, slots, count, weights, norm, target + 4 * d
                )
            else:
                for e in range(d, width, LANES):
                    place = values + step * e
                    mix_one(place, num_bytes, size - e, slots, count, weights, norm, target + 4 * e)

    @njit
    def mix_four(values, num_bytes, step, slots, count, weights, norm, target):
        a = b = c = d = splat(types.float32(0.0))
        for i in range(count):
            value = values + num_bytes * load_i64(slots + 8 * i)
            weight = splat(load_f32(weights + 4 * i))
            a = fma(weight, read(value), a)
            b = fma(weight, read(value + step * LANES), b)
            c = fma(weight, read(value + 2 * step * LANES), c)
            d = fma(weight, read(value + 3 * step * LANES), d)
        store(target, divide(a, norm))
        store(target + 4 * LANES, divide(b, norm))
        store(target + 8 * LANES, divide(c, norm))
        store(target + 12 * LANES, divide(d, norm))

    @njit
    def mix_one(values, num_bytes, size, slots, count, weights, norm, target):
        a = splat(types.float32(0.0))
        for i in range(count):
            value = values + num_bytes * load_i64(slots + 8 * i)
            a = fma(splat(load_f32(weights + 4 * i)), read(value), a)
        a = divide(a, norm)
        if size >= LANES:
            store(target, a)
        else:
            for lane in range(size):
                store_f32(target + 4 * lane, take_lane(a, lane))

    return score_slots, mix_slots


score_slots_bf16, mix_slots_bf16 = make_attention(load_bf16)
score_slots_f32, mix_slots_f32 = make_attention(load)


@njit
def route(job, op, thread):
    """Choose each token's experts, in every thread alike; ties go to the lower index.

    An expert's share is its probability, among the chosen ones where they are normalized.
    """
    count = list_rows(job, op, thread)
    rows, tile = own(job, thread, Job.ROWS), own(job, thread, Job.TILE)
    choices, shares = own(job, thread, Job.CHOICES), own(job, thread, Job.SHARES)
    num_experts, per_token = word(op, Experts.NUM_EXPERTS), word(op, Experts.PER_TOKEN)
    blocks, stride = word(op, Experts.ROUTER_BLOCKS), word(op, Experts.ROUTER_STRIDE)
    logits = own(job, thread, Job.SCORES)
    for token in range(count):
        for block in range(0, blocks, MAX_BLOCKS):
            together = min(MAX_BLOCKS, blocks - block)
            place = word(op, Experts.ROUTER) + stride * block
            inputs = word(op, Experts.INPUTS)
            kind = word(op, Experts.KIND)
            product(kind, place, stride, together, rows + 8 * token, 1, inputs, tile, 1)
            for i in range(LANES * together):
                store_f32(logits + 4 * (LANES * block + i), load_f32(tile + 4 * i))
        gates = word(op, Experts.GATES)
        if gates >= 0 and thread == 0:
            store_f32(buffer_row(job, gates, token), load_f32(logits + 4 * num_experts))
        pick = per_token * token
        total = choose_experts(
            logits, num_experts, per_token, choices + 8 * pick, shares + 4 * pick
        )
        if word(op, Experts.IS_NORMALIZED):
            total = types.float32(0.0)
            for k in range(per_token):
                total += load_f32(shares + 4 * (pick + k))
        for k in range(per_token):
            place = shares + 4 * (pick + k)
            store_f32(place, load_f32(place) / total)
    return count


@njit
def choose_experts(logits, num_experts, per_token, choices, shares):
    """Write the experts of the largest logits and their exponentials; returns the sum over all."""
    for k in range(per_token):
        best = types.int64(-1)
        for expert in range(num_experts):
            is_taken = False
            for i in range(k):
                is_taken = is_taken or load_i64(choices + 8 * i) == expert
            is_better = best < 0 or load_f32(logits + 4 * expert) > load_f32(logits + 4 * best)
            if is_better and not is_taken:
                best = expert
        store_i64(choices + 8 * k, best)
    top = load_f32(logits + 4 * load_i64(choices))
    total = types.float32(0.0)
    for expert in range(num_experts):
        weight = exp_of(load_f32(logits + 4 * expert) - top)
        total += weight
        for k in range(per_token):
            if load_i64(choices + 8 * k) == expert:
                store_f32(shares + 4 * k, weight)
    return total


@njit
def exp_of(x):
    """Return e**x."""
    return take_lane(exp(splat(x)), 0)


@njit
def report_load(job, op, count, choices):
    """Write down how many tokens each expert has, and who chose whom."""
    num_experts, per_token = word(op, Experts.NUM_EXPERTS), word(op, Experts.PER_TOKEN)
    mixture = word(op, Experts.MIXTURE)
    loads = word(job, Job.LOADS) + 4 * num_experts * mixture
    chosen = word(job, Job.CHOSEN) + 4 * per_token * count * mixture
    for expert in range(num_experts):
        store_i32(loads + 4 * expert, types.int32(0))
    for i in range(per_token * count):
        expert = load_i64(choices + 8 * i)
        place = loads + 4 * expert
        store_i32(place, types.int32(load_i32(place) + 1))
        store_i32(chosen + 4 * i, types.int32(expert))


@njit
def list_visits(choices, num_visits, expert, visits):
    """List the choices that fell on an expert; returns how many."""
    count = 0
    for i in range(num_visits):
        store_i64(visits + 8 * count, i)
        count += load_i64(choices + 8 * i) == expert
    return count


@njit
def experts_up(job, op, thread, counters):
    """Route, then run gate and up of the experts that have tokens; a row for each choice."""
    count = route(job, op, thread)
    rows, tile = own(job, thread, Job.ROWS), own(job, thread, Job.TILE)
    choices, visits = own(job, thread, Job.CHOICES), own(job, thread, Job.SLOTS)
    if thread == 0:
        report_load(job, op, count, choices)
    per_token, num_blocks = word(op, Experts.PER_TOKEN), word(op, Experts.NUM_BLOCKS)
    visited, num_threads = rows + 8 * count, word(job, Job.NUM_THREADS)
    num_active = types.int64(0)
    for expert in range(word(op, Experts.NUM_EXPERTS)):
        num_active += list_visits(choices, per_token * count, expert, visits) > 0
    # A row of blocks: those of all active experts, one behind the other.
    block, stop = take(counters, thread, num_threads, num_active * num_blocks, 2)
    rank, expert, num = types.int64(-1), types.int64(-1), types.int64(0)
    while stop:
        if block // num_blocks < rank:  # stolen from the front
            rank, expert = types.int64(-1), types.int64(-1)
        while rank < block // num_blocks:
            expert += 1
            num = list_visits(choices, per_token * count, expert, visits)
            rank += num > 0
        for i in range(num):
            row = load_i64(rows + 8 * (load_i64(visits + 8 * i) // per_token))
            store_i64(visited + 8 * i, row)
        run_expert_up(job, op, expert, block % num_blocks, stop - block, visits, visited, num, tile)
        block, stop = take(counters, thread, num_threads, num_active * num_blocks, 2)


@njit
def run_expert_up(job, op, expert, block, num_blocks, visits, rows, count, out):
    """Run a pair of blocks of an expert's gate and up on the rows that visit it."""
    stride, kind = word(op, Experts.STRIDE), word(op, Experts.KIND)
    place = word(op, Experts.WEIGHTS) + stride * (expert * word(op, Experts.NUM_BLOCKS) + block)
    inputs, num_tiles = word(op, Experts.INPUTS), tiles_of(count)
    for tile in range(num_tiles):
        first, end = share_of(count, tile, num_tiles)
        here = rows + 8 * first
        product(kind, place, stride, num_blocks, here, end - first, inputs, out, num_tiles)
        for i in range(end - first):
            line = out + 4 * TILE_WIDTH * i
            visit = load_i64(visits + 8 * (first + i))
            target = buffer_row(job, word(op, Experts.TARGET), visit) + 2 * LANES * block
            store(target, multiply(silu(load(line)), load(line + 4 * LANES)))


@njit
def experts_down(job, op, thread, counters):
    """Add what each token's experts put out, by their shares, experts ascending."""
    count = word(job, Job.NUM_TOKENS)
    rows, tile = own(job, thread, Job.ROWS), own(job, thread, Job.TILE)
    choices, shares = own(job, thread, Job.CHOICES), own(job, thread, Job.SHARES)
    visits = own(job, thread, Job.SLOTS)
    per_token, num_blocks = word(op, Experts.PER_TOKEN), word(op, Experts.NUM_BLOCKS)
    num_threads = word(job, Job.NUM_THREADS)
    block, stop = take(counters, thread, num_threads, num_blocks, 2)
    while stop:
        for expert in range(word(op, Experts.NUM_EXPERTS)):
            num = list_visits(choices, per_token * count, expert, visits)
            for i in range(num):
                hidden = buffer_row(job, word(op, Experts.TARGET), load_i64(visits + 8 * i))
                store_i64(rows + 8 * i, hidden)
            run_expert_down(job, op, expert, block, stop - block, visits, rows, num, shares, tile)
        block, stop = take(counters, thread, num_threads, num_blocks, 2)


@njit
def run_expert_down(job, op, expert, block, num_blocks, visits, rows, count, shares, out):
    """Add some blocks of what an expert puts out to the rows that visit it, by their shares."""
    stride, kind = word(op, Experts.STRIDE), word(op, Experts.KIND)
    place = word(op, Experts.WEIGHTS) + stride * (expert * word(op, Experts.NUM_BLOCKS) + block)
    inner, num_tiles = word(op, Experts.INNER), tiles_of(count)
    for tile in range(num_tiles):
        first, end = share_of(count, tile, num_tiles)
        here = rows + 8 * first
        product(kind, place, stride, num_blocks, here, end - first, inner, out, num_tiles)
        for i in range(end - first):
            visit = load_i64(visits + 8 * (first + i))
            share = splat(load_f32(shares + 4 * visit))
            target = buffer_row(job, word(op, Experts.SOURCE), visit // word(op, Experts.PER_TOKEN))
            for b in range(num_blocks):
                cell = target + 4 * LANES * (block + b)
                value = load(out + 4 * (TILE_WIDTH * i + LANES * b))
                store(cell, fma(share, value, load(cell)))


@njit
def gather(job, op, thread, num_threads):
    """Copy the target's features of tokens into a buffer, where they are known."""
    size, kind = word(op, Place.SIZE), word(op, Place.KIND)
    num_bytes = 2 if kind == BFLOAT16 else 4
    first, stop = share_of(word(job, Job.NUM_TOKENS), thread, num_threads)
    for token in range(first, stop):
        target = buffer_row(job, word(op, Place.TARGET), token)
        place = token_word(job, token, Token.SOURCE)
        if place >= 0:
            column = place * word(op, Place.WIDTH) + word(op, Place.COLUMN)
            source = word(job, Job.FEATURES) + num_bytes * column
            for i in range(0, size, LANES):
                store(target + 4 * i, read_state(source + num_bytes * i, kind))


@njit
def guess(job, op, thread, num_threads):
    """Copy the guesses of their rows in place of features that are unknown."""
    size = word(op, Place.SIZE)
    first, stop = share_of(word(job, Job.NUM_TOKENS), thread, num_threads)
    for token in range(first, stop):
        if token_word(job, token, Token.SOURCE) < 0:
            row = token_word(job, token, Token.ROW)
            source = word(job, Job.GUESSES) + 4 * size * row
            target = buffer_row(job, word(op, Place.TARGET), token)
            for i in range(0, size, LANES):
                store(target + 4 * i, load(source + 4 * i))


@njit
def run(job, team, thread):
    """Run a job's operations as one of its threads."""
    num_threads = word(job, Job.NUM_THREADS)
    for index in range(word(job, Job.NUM_OPS)):
        op = word(job, Job.OPS) + 8 * OP_WORDS * index
        counters = word(job, Job.COUNTERS) + LINE * num_threads * index
        kind = word(op, 0)
        if kind == Op.LINEAR:
            linear(job, op, thread, counters)
        elif kind == Op.ROTATE:
            rotate(job, op, thread, num_threads)
        elif kind == Op.ATTEND:
            attend(job, op, thread, num_threads, counters)
        elif kind == Op.EXPERTS_UP:
            experts_up(job, op, thread, counters)
        elif kind == Op.EXPERTS_DOWN:
            experts_down(job, op, thread, counters)
        elif kind == Op.EMBED:
            embed(job, op, thread, num_threads)
        elif kind == Op.KEEP:
            keep(job, op, thread, num_threads)
        elif kind == Op.GATHER:
            gather(job, op, thread, num_threads)
        else:
            guess(job, op, thread, num_threads)
        barrier(team, num_threads)
