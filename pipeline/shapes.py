"""The few shapes that device batches have, and what each is estimated to cost."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import SettingsError

Shape = tuple[int, int]  # B, T


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Estimated seconds of a device batch: `batch_seconds + B·T · token_seconds · (1 + T / attention_tokens)`."""

    batch_seconds: float
    token_seconds: float
    attention_tokens: float  # the row length at which attention takes as long as all else
    compile_seconds: float

    def token(self, T: int) -> float:
        """Seconds of a token in a row of T."""
        return self.token_seconds * (1 + T / self.attention_tokens)

    def batch(self, B: int, T: int) -> float:
        return self.batch_seconds + B * T * self.token(T)


@dataclass(frozen=True, kw_only=True)
class ShapeTable:
    """The shapes that device batches may have.

    `full` holds (B, T) of a full batch for each width T, ascending. The last batch of a Load may have a quarter of the
    rows. Other halves of B, down to `local_devices`, are for devices that run out of memory.
    """

    full: tuple[Shape, ...]
    local_devices: int
    cost: CostModel

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Every (B, T) that may come, halves included."""
        shapes = []
        for B, T in self.full:
            while B >= self.local_devices:
                shapes.append((B, T))
                B //= 2
        return tuple(shapes)

    @property
    def max_tokens_per_batch(self) -> int:
        return max(B * T for B, T in self.full)

    def quarter(self, shape: Shape) -> Shape:
        """A batch of this width with a quarter of the rows, or as few as there are devices."""
        B, T = shape
        return max(B // 4, self.local_devices), T


@dataclass(frozen=True, kw_only=True)
class _Device:
    batch_tokens: int  # padded tokens of a full batch
    step: int  # widths are multiples of it
    cost: CostModel


_DEVICES = {
    # Measured with all-MiniLM-L6-v2 in bfloat16 on two Zen 4 cores (`python tests/benchmarks/padding.py --measure`). A batch
    # of 1,024 tokens stays in cache; one of 2,048 takes 1.2 times as long for each. A program takes 0.75 s to compile
    # and 0.2 s to load when it was compiled by an earlier run.
    "cpu": _Device(
        batch_tokens=2**10,
        step=16,
        cost=CostModel(
            batch_seconds=2e-3, token_seconds=26e-6, attention_tokens=550, compile_seconds=0.4
        ),
    ),
    # Estimates from FLOPs and dispatch times. Compiling weighs so much that shapes stay few.
    "gpu": _Device(
        batch_tokens=2**15,
        step=64,
        cost=CostModel(
            batch_seconds=3e-4, token_seconds=0.3e-6, attention_tokens=2000, compile_seconds=5.0
        ),
    ),
    "tpu": _Device(
        batch_tokens=2**15,
        step=128,
        cost=CostModel(
            batch_seconds=3e-4, token_seconds=0.3e-6, attention_tokens=2000, compile_seconds=20.0
        ),
    ),
}


def shape_table(
    device: str, window_tokens: int, max_tokens_per_batch: int | None, local_devices: int
) -> ShapeTable:
    """The shapes for windows of up to so many tokens, and batches of so many padded ones (default: what suits the device).

    Raises:
      SettingsError: a batch is too small for one window on each device.
    """
    least = window_tokens * local_devices
    if max_tokens_per_batch is not None and max_tokens_per_batch < least:
        raise SettingsError(
            f"--max-tokens-per-batch: expected at least {least}, a window of {window_tokens} tokens on each of "
            f"{local_devices} devices, got {max_tokens_per_batch}"
        )
    kind = _DEVICES[device]
    budget = max_tokens_per_batch or kind.batch_tokens
    full = []
    for T in [*range(kind.step, window_tokens, kind.step), window_tokens]:
        B = local_devices
        while 2 * B * T <= budget:
            B *= 2
        full.append((B, T))
    return ShapeTable(full=tuple(full), local_devices=local_devices, cost=kind.cost)
