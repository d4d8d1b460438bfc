"""Flash attention on TPU, written in Pallas: no T×T weights in memory, and no work on tiles that nothing attends.

kernels/README.md explains the ideas and the words, with a diagram. In short: for a tile of queries the kernel goes
over the tiles of keys that any of them attends, and adds up, for each query, its weights and its weighted values;
it divides one by the other at the end (https://arxiv.org/abs/2205.14135). What is particular here:

- **Everything is transposed.** Scores are `K·Qᵀ` [keys, queries], the context is `Vᵀ·P` [H, queries]. A register of
  a TPU has 8 sublanes × 128 lanes; with queries along lanes, what is known per query (sum of weights, bounds
  of its text) is one row, summing over keys adds whole registers up, and the second product takes time in proportion
  to H. The other way round, every H up to 128 takes as long as 128.
- **The kernel reads qkv as the projection wrote it**, 128 lanes at a time: a *lane group* holds 4, 2 or 1 heads of
  width 32, 64 or 128. To get the scores of one head, the lanes of the others are zeroed in Q: the matrix unit
  multiplies 128 deep in any case. Nothing is copied or transposed around the kernel.
- **A mask is an interval.** Texts are contiguous, so what a query attends is `start <= key < end`, the window
  included. The live key tiles of a query tile are a range, and so are those among them that need no mask.
- **Weights are `exp2(score)`, with no maximum subtracted,** which spares a pass over the scores and the wait for it. That
  is exact while the sums of weights stay within RANGE, and the kernel looks: where one did not, or something is not
  finite, it does that head of that tile again (`careful_head`). Real models hardly get there (tiles.py has the figures).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.attention import tiles
from kernels.attention.contract import Case, Context, FusedProjection, SegmentIds, check_call
from kernels.attention.intervals import INT32_MIN, plan
from kernels.attention.tiles import LANES, Tiles

# Sums of weights that prove that exp2 lost nothing: the largest weight is at least 2**-60 / T, so what was flushed to 0
# (below 2**-126) could not have counted; and none is infinite. A weighted value that overflows shows by itself.
RANGE = (2.0**-60, 2.0**126)
# What stands for "below every score", finite so that a difference of two is no NaN.
LOWEST = -1e30
# How far apart the kinds of work on key tiles are: see `attend`.
AHEAD, BEHIND = 6, 2


@dataclass(frozen=True)
class PallasTpu:
    """
    Attributes:
      choose_tiles: the tiles for a case that fills registers, and the chip.
      interpret: for tests, what pallas_call takes to run on a CPU: True, or pltpu.InterpretParams(…).
    """

    name: ClassVar[str] = "pallas_tpu"
    choose_tiles: Callable[[Case, str | None], Tiles] = tiles.choose
    interpret: Any = False

    def refusal(self, case: Case, device: jax.Device) -> str | None:
        if not self.interpret and device.platform != "tpu":
            return "needs a TPU"
        return tiles.refusal(case, self.choose_tiles, device.device_kind)

    def __call__(
        self,
        qkv: FusedProjection,
        segment_ids: SegmentIds,
        *,
        num_heads: int,
        window: int | None = None,
    ) -> Context:
        case = check_call(qkv, segment_ids, num_heads=num_heads, window=window)
        padded = tiles.fill_registers(case)
        if (padded.T, padded.N, padded.H) != (case.T, case.N, case.H):
            # For shapes that do not fill registers. A copy, but models of today do not come here.
            parts = qkv.reshape(case.B, case.T, 3, case.N, case.H)
            more = (0, padded.T - case.T), (0, 0), (0, padded.N - case.N), (0, padded.H - case.H)
            qkv = jnp.pad(parts, ((0, 0), *more)).reshape(case.B, padded.T, -1)
            segment_ids = jnp.pad(segment_ids, ((0, 0), more[0]))
        chosen = self.choose_tiles(padded, tiles.kind_of_this_program())
        scale = case.H**-0.5 * math.log2(math.e)  # exp(x) = exp2(x · log2 e)
        with jax.named_scope(self.name):
            interval, ranges = plan(segment_ids, window, chosen.queries, chosen.keys)
            run = functools.partial(_flash, case=padded, tiles=chosen, scale=scale)
            context: jax.Array = run(ranges, interval, qkv, interpret=self.interpret)
        if context.shape != (case.B, case.T, case.N * case.H):
            parts = context.reshape(case.B, padded.T, padded.N, padded.H)
            context = parts[:, : case.T, : case.N, : case.H].reshape(case.B, case.T, -1)
        return context


# A function of its own, so that an encoder's layers share one: it is traced and lowered once.
@functools.partial(jax.jit, static_argnames=("case", "tiles", "scale", "interpret"))
def _flash(
    ranges: jax.Array, interval: jax.Array, qkv: jax.Array,
    *, case: Case, tiles: Tiles, scale: float, interpret: Any,
) -> jax.Array:  # fmt: skip
    """The call of the kernel, for a case that fills registers. The window is in what `plan` gave."""
    B, T, D, H = case.B, case.T, case.N * case.H, case.H
    width = tiles.groups * max(LANES, H)  # lanes of a grid step
    heads, steps, chunk, queries = width // H, D // width, tiles.chunk, tiles.queries
    rows = H + 16 if tiles.sums_on_mxu else H
    dtype, size = qkv.dtype, qkv.dtype.itemsize

    # A grid step has some heads (g) of some queries (c) of a row (b), and all keys and values of those heads. The three
    # thirds of qkv are one array: a block's last index counts in widths from its left edge.
    def block(positions: int, index: Callable[..., Any]) -> pl.BlockSpec:
        return pl.BlockSpec((1, positions, width), index)

    of_queries = block(chunk, lambda b, g, c, _: (b, c, g))
    of_keys = block(T, lambda b, g, c, _: (b, 0, steps + g))
    of_values = block(T, lambda b, g, c, _: (b, 0, 2 * steps + g))
    of_interval = pl.BlockSpec((1, 2, T), lambda b, g, c, _: (b, 0, 0))
    scratch = [
        pltpu.VMEM((heads, rows, T), dtype),  # values, and so on in the order of _Kernel
        pltpu.VMEM((heads, rows, queries), jnp.float32),
        pltpu.VMEM((heads, 8, queries), jnp.float32),
        *[pltpu.VMEM((heads, 1, chunk), jnp.float32)] * 2,
        *[pltpu.VMEM((1, queries), jnp.float32)] * 3,
        pltpu.VMEM((2, tiles.keys * size // 4, queries), jnp.int32),
    ]
    context: jax.Array = pl.pallas_call(
        lambda *refs: _Kernel(H, heads, scale, tiles, pl.program_id(2) * chunk, *refs).run(),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, steps, T // chunk),
            in_specs=[of_interval, of_queries, of_keys, of_values],
            out_specs=of_queries,
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct((B, T, D), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=tiles.vmem_bytes(case),
        ),
        # For XLA's scheduler and for profilers, which cannot look inside. As if every key were attended.
        cost_estimate=pl.CostEstimate(
            flops=4 * B * T * T * D,
            transcendentals=B * case.N * T * T,
            bytes_accessed=4 * B * T * D * size + 8 * B * T,
        ),
        interpret=interpret,
        name="flash_attention",
    )(ranges.reshape(-1), interval, qkv, qkv, qkv)
    return context


@dataclass(frozen=True, eq=False)
class _Kernel:
    """One grid step. Its methods run once, when the kernel is compiled: what they do to refs is the program.

    Everywhere below, i is the number of a query tile in the chunk, and j that of a key tile in the row.
    """

    H: int
    heads: int
    scale: float
    tiles: Tiles
    chunk_start: Any
    # Refs: memory in VMEM, `ranges` in the scalar unit's SMEM.
    ranges: Any  # [B · T/queries · 4], see `plan`
    interval: Any  # [1, 2, T], see `plan`
    q: Any  # [1, chunk, width]
    k: Any  # [1, T, width]
    v: Any  # [1, T, width]
    out: Any  # [1, chunk, width]
    values: Any  # [heads, H (+ 16), T]: Vᵀ, 0 at padding; with sums_on_mxu, rows of ones below
    context: Any  # [heads, H (+ 16), queries]: weighted values so far, and below them the sums of weights
    sums: Any  # [heads, 8, queries]: without sums_on_mxu, the weights so far, to be added up over the 8
    first_sums: Any  # [heads, 1, chunk]: the sums of weights of the first attempt
    wrong: Any  # [heads, 1, chunk]: 1 where a sum is out of RANGE, or something is not finite
    any_wrong: Any  # [1, queries]: the same, over all heads and query tiles
    highest: Any  # [1, queries]: what the careful way subtracts from scores
    spoilt: Any  # [1, queries]: NaN for queries that attend a value that is not finite, else 0
    allowed: Any  # [2, keys, queries] in bits, for two key tiles: ones where a query attends a key

    def run(self) -> None:
        tiles_of_chunk = self.tiles.chunk // self.tiles.queries
        first = (pl.program_id(0) * pl.num_programs(2) + pl.program_id(2)) * tiles_of_chunk

        def every_tile(step: Callable[[Any, Any], None]) -> None:
            lax.fori_loop(0, tiles_of_chunk, lambda i, _: step(i, (first + i) * 4), None)

        if self.tiles.chunk == self.k.shape[1]:
            self.transpose_values()
        else:  # they stay for the row's other chunks
            pl.when(self.chunk_start == 0)(self.transpose_values)
        for ref in (self.context, self.sums, self.any_wrong):
            ref[...] = jnp.zeros_like(ref)
        every_tile(self.tile)

        @pl.when(jnp.max(self.any_wrong[...]) > 0)
        def _() -> None:
            self.transpose_values(finite_only=True)
            every_tile(self.careful_tile)
            self.transpose_values()  # the next chunk, too, has to notice what is not finite

    def lanes(self, head: Any) -> Any:
        """The lane group of a head, whose number may be known only when the kernel runs."""
        width = max(LANES, self.H)
        return pl.ds(pl.multiple_of(lax.div(head, self.in_group) * width, width), width)

    @property
    def in_group(self) -> int:
        return max(LANES // self.H, 1)  # heads of a lane group

    def is_of(self, head: Any) -> jax.Array:
        """bool[1, lanes]: which lanes of its group belong to a head."""
        low = lax.rem(head, self.in_group) * self.H
        lane = lax.broadcasted_iota(jnp.int32, (1, max(LANES, self.H)), 1)
        return (lane >= low) & (lane < low + self.H)

    def at_queries(self, i: Any, start: Any = 0) -> Any:
        size = self.tiles.queries
        return pl.ds(pl.multiple_of(start + i * size, size), size)

    def at_keys(self, j: Any) -> Any:
        return pl.ds(pl.multiple_of(j * self.tiles.keys, self.tiles.keys), self.tiles.keys)

    def interval_of(self, i: Any) -> tuple[jax.Array, jax.Array]:
        columns = self.at_queries(i, self.chunk_start)
        return self.interval[0, 0:1, columns], self.interval[0, 1:2, columns]

    def transpose_values(self, finite_only: bool = False) -> None:
        """Fills `values`. Padding becomes 0, since a weight of 0 does not silence a value of NaN."""
        T, H = self.k.shape[1], self.H
        part = math.gcd(T, 512)

        def step(n: Any, _: None) -> None:
            at = pl.ds(pl.multiple_of(n * part, part), part)
            text = jnp.where(self.interval[0, 1:2, at] != INT32_MIN, -1, 0)
            for head in range(0, self.heads, self.in_group):
                v = self.v[0, at, self.lanes(head)]
                if finite_only:
                    v = v.astype(jnp.float32)
                    v = jnp.where(jnp.abs(v) < jnp.inf, v, 0).astype(self.q.dtype)
                v = _and(v.T, text)
                for n in range(self.in_group):
                    self.values[head + n, :H, at] = v[n * H : (n + 1) * H]

        lax.fori_loop(0, T // part, step, None, unroll=T // part <= 4)
        if self.tiles.sums_on_mxu:
            self.values[:, H:, :] = jnp.ones((self.heads, 16, T), self.q.dtype)

    def scores(self, head: Any, i: Any, j: Any) -> jax.Array:
        """float32[keys, queries], still without the scale."""
        q = self.q[0, self.at_queries(i), self.lanes(head)]
        if self.in_group > 1:
            q = _and(q, jnp.where(self.is_of(head), -1, 0))
        return _product(self.k[0, self.at_keys(j), self.lanes(head)], q, over=(1, 1))

    def tile(self, i: Any, r: Any) -> None:
        """Attends and writes query tile i, whose entry of `ranges` starts at r."""
        low, high, full_low, full_high = (self.ranges[r + n] for n in range(4))
        at_once = min(2, self.k.shape[1] // self.tiles.keys)  # key tiles
        steps = lax.div(high - low, at_once)

        def step(n: Any, _: None) -> None:
            js = [low + n * at_once + m for m in range(at_once)]
            full = (js[0] >= full_low) & (js[-1] < full_high)
            pl.when(full)(lambda: self.attend(i, js, masked=False))
            pl.when(~full)(lambda: self.attend(i, js, masked=True))

        lax.fori_loop(0, steps, step, None)
        if at_once > 1:
            pl.when(low + steps * at_once < high)(lambda: self.attend(i, [high - 1], masked=True))
        self.finish(i)

    def attend(self, i: Any, js: Sequence[Any], *, masked: bool) -> None:
        """Adds key tiles to the sums of query tile i, for all heads of the step.

        The matrix unit and the vector units can work at once, but the compiler hardly reorders what is written one after
        the other. So it is written the way it should run: while the scores of item n are computed, the
        weights of item n - AHEAD and the weighted values of item n - AHEAD - BEHIND.
        """
        if masked:
            for m, j in enumerate(js):
                self.mark_allowed(m, i, j)
        items = [(m, j, head) for m, j in enumerate(js) for head in range(self.heads)]
        scores, weights = dict[int, jax.Array](), dict[int, jax.Array]()
        for n in range(len(items) + AHEAD + BEHIND):
            if n < len(items):
                _, j, head = items[n]
                scores[n] = self.scores(head, i, j)
            if 0 <= (u := n - AHEAD) < len(items):
                p = jnp.exp2(self.scale * scores.pop(u)).astype(self.q.dtype)
                weights[u] = _and(p, self.allowed[items[u][0]]) if masked else p
            if 0 <= (w := n - AHEAD - BEHIND) < len(items):
                _, j, head = items[w]
                self.add(head, j, weights.pop(w))

    def mark_allowed(self, m: int, i: Any, j: Any) -> None:
        row0, row1 = self.interval_of(i)
        in_word = (
            4 // self.q.dtype.itemsize
        )  # word w of a lane has keys 2w and 2w + 1, or only key w
        bits = (0xFFFF, -0x10000) if in_word == 2 else (-1,)
        words = lax.broadcasted_iota(jnp.int32, (8, self.tiles.queries), 0)
        key = words * in_word + (row0 + j * self.tiles.keys)
        for w in range(0, self.tiles.keys // in_word, 8):
            word = jnp.zeros_like(key)
            for n, ones in enumerate(bits):
                word |= jnp.where(key + (w * in_word + n) < row1, ones, 0)
            self.allowed[m, w : w + 8] = word

    def add(self, head: Any, j: Any, p: jax.Array) -> None:
        """Adds weights [keys, queries] and the values they weigh to the sums."""
        if not self.tiles.sums_on_mxu:
            self.sums[head] += p.astype(jnp.float32).reshape(-1, 8, self.tiles.queries).sum(0)
        self.context[head] += _product(self.values[head, :, self.at_keys(j)], p, over=(1, 0))

    def take_context(self, head: Any) -> tuple[jax.Array, jax.Array]:
        """The context [H, queries], the sums of weights [1, queries]; and clears both for the next tile."""
        if self.tiles.sums_on_mxu:
            sums = self.context[head, self.H : self.H + 1]
        else:
            sums = jnp.sum(self.sums[head], axis=0, keepdims=True)
            self.sums[head] = jnp.zeros_like(self.sums[head])
        # Padding has sums of 0, and a context of 0.
        context = self.context[head, : self.H] * jnp.where(sums == 0, 0, 1 / sums)
        self.context[head] = jnp.zeros_like(self.context[head])
        return context, sums

    def finish(self, i: Any) -> None:
        """Writes the context of query tile i, and notes where it is not right."""
        text = self.interval_of(i)[1] != INT32_MIN
        for group in range(0, self.heads, self.in_group):
            parts = []
            for head in range(group, group + self.in_group):
                context, sums = self.take_context(head)
                parts.append(context)
                # NaN where anything is not finite, and that is in no range.
                probe = sums + 0 * jnp.sum(context, axis=0, keepdims=True)
                good = (probe > RANGE[0]) & (probe < RANGE[1])
                wrong = jnp.where(good | ~text, 0.0, 1.0)
                self.first_sums[head, :, self.at_queries(i)] = sums
                self.wrong[head, :, self.at_queries(i)] = wrong
                self.any_wrong[...] = jnp.maximum(self.any_wrong[...], wrong)
            rows = jnp.concatenate(parts, axis=0).astype(self.q.dtype).T
            self.out[0, self.at_queries(i), self.lanes(group)] = rows

    def careful_tile(self, i: Any, r: Any) -> None:
        """Does those heads of query tile i again in which something is wrong. One at a time: slow, but little code."""

        def check(head: Any, _: None) -> None:
            wrong = jnp.max(self.wrong[head, :, self.at_queries(i)]) > 0
            pl.when(wrong)(lambda: self.careful_head(head, i, r))

        lax.fori_loop(0, self.heads, check, None)

    def careful_head(self, head: Any, i: Any, r: Any) -> None:
        """Subtracts the highest score of each query, which has to be found first."""
        low, high = self.ranges[r], self.ranges[r + 1]

        def find_highest(j: Any, _: None) -> None:
            row0, row1 = self.interval_of(i)
            key = lax.broadcasted_iota(jnp.int32, (self.tiles.keys, 1), 0) + j * self.tiles.keys
            allowed = key + row0 < row1
            scores = jnp.where(allowed, self.scale * self.scores(head, i, j), LOWEST)
            highest = jnp.max(scores, axis=0, keepdims=True)
            self.highest[...] = jnp.maximum(self.highest[...], highest)
            v = self.v[0, self.at_keys(j), self.lanes(head)].astype(jnp.float32)
            spoilt = jnp.sum(jnp.where(self.is_of(head), 0 * v, 0), axis=1, keepdims=True)
            self.spoilt[...] += jnp.sum(jnp.where(allowed, spoilt, 0), axis=0, keepdims=True)

        def attend(j: Any, _: None) -> None:
            self.mark_allowed(0, i, j)
            scores, highest = self.scale * self.scores(head, i, j), self.highest[...]
            # The first form is that of the first attempt, so that compilers round it alike.
            p = jnp.where(highest == 0, jnp.exp2(scores), jnp.exp2(scores - highest))
            self.add(head, j, _and(p.astype(self.q.dtype), self.allowed[0]))

        self.highest[...] = jnp.full_like(self.highest, LOWEST)
        self.spoilt[...] = jnp.zeros_like(self.spoilt)
        lax.fori_loop(low, high, find_highest, None)
        # Where the first attempt was good its result stays, to the bit: no text depends on its neighbours.
        sums = self.first_sums[head, :, self.at_queries(i)]
        good = (sums > RANGE[0]) & (sums < RANGE[1])
        self.highest[...] = jnp.where(good, 0, self.highest[...]) + self.spoilt[...]
        lax.fori_loop(low, high, attend, None)
        context, _ = self.take_context(head)
        at = 0, self.at_queries(i), self.lanes(head)
        rows = jnp.concatenate([context] * self.in_group, axis=0).T
        rows = jnp.where(self.is_of(head), rows, self.out[at].astype(jnp.float32))
        self.out[at] = rows.astype(self.q.dtype)


def _product(x: jax.Array, y: jax.Array, over: tuple[int, int]) -> jax.Array:
    axes = (((over[0],), (over[1],)), ((), ()))
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)


def _and(x: jax.Array, bits: jax.Array) -> jax.Array:
    """x where the bits are ones, 0 where they are zeros: unlike with a product, also where x is NaN."""
    return pltpu.bitcast(pltpu.bitcast(x, jnp.int32) & bits, x.dtype)
