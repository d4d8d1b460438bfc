"""A loaded model: NumPy batches of a few fixed shapes in, pooled vectors out, on all devices of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from kernels.attention.select import select
from model import checkpoint as checkpoints
from model.config import EncoderConfig
from model.devices import (
    DeviceError,
    local_device_count,
    local_devices,
    resolve_device,
    resolve_dtype,
    use_compilation_cache,
)
from model.program import ROWS, by_rows, cases, describe, everywhere, lower

__all__ = [
    "DeviceError",
    "InvalidInput",
    "OutOfDeviceMemory",
    "Predictor",
    "cases",
    "local_device_count",
    "local_devices",
    "resolve_device",
    "resolve_dtype",
]


class InvalidInput(ValueError):
    """A token, segment or position out of range: the fault of a text in the batch, not of whoever built it."""


class OutOfDeviceMemory(RuntimeError):
    """A batch, or the program for its shape, does not fit the device's memory; half of it may."""


class Predictor:
    """A checkpoint on the local devices of one kind, data parallel: each computes its share of a batch's rows.

    Not safe for several threads at once: whoever calls `dispatch` or `fetch` from one of several holds `lock`.

    Attributes:
      config: what the checkpoint declares.
      attention: name of the implementation chosen.
      attention_reasons: {name: why not} of those that were preferred to it.
      device: "cpu", "gpu" or "tpu".
      local_devices: number of devices; B is a multiple of it.
      compiled_programs: one for each shape and number of segments that came.
      compile_seconds: spent in compiling them, or in reading them from the cache.
      lock: see above.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        task: str,
        device: str,
        dtype: str,
        attention: str,
        shapes: Sequence[tuple[int, int]],
    ) -> None:
        """Loads the weights and picks the attention; programs are compiled when their shape first comes.

        Args:
          checkpoint: folder of a published checkpoint.
          task: "embed".
          device: "cpu", "gpu", "tpu" or "auto".
          dtype: what matmuls compute in: "float32", "bfloat16" or "auto".
          attention: name of an implementation, or "auto".
          shapes: every (B, T) that will come.

        Raises:
          CheckpointError: the checkpoint cannot be used.
          DeviceError: the device is not there.
          kernels.attention.select.SelectionError: the attention cannot be used.
          ValueError: a wrong argument.
        """
        if task != "embed":
            raise ValueError(f"task: expected 'embed', got {task!r}")
        self.config = EncoderConfig.from_checkpoint(checkpoint)
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(dtype, self.device)
        use_compilation_cache()
        devices = local_devices(self.device)
        self.local_devices = len(devices)
        self._shapes = frozenset(shapes)
        for B, T in self._shapes:
            if B < 1 or T < 1 or B % self.local_devices:
                raise ValueError(
                    f"shapes: expected B a multiple of the {self.local_devices} local devices, got {B}x{T}"
                )

        selection = select(
            attention,
            cases(self.config, self.dtype, list(self._shapes), self.local_devices),
            devices[0],
        )
        self.attention = selection.implementation.name
        self.attention_reasons = dict(selection.reasons)
        self._attention = selection.implementation

        self._mesh = Mesh(np.array(devices), (ROWS,))
        self._network, state = describe(self.config, self.dtype)
        self._parameters = _place(state, checkpoints.load(checkpoint, self.config), self._mesh)
        self._programs: dict[tuple[int, int, int], Callable[..., jax.Array]] = {}
        self.compile_seconds = 0.0
        self.lock = threading.Lock()

    @property
    def compiled_programs(self) -> int:
        return len(self._programs)

    def dispatch(
        self,
        token_ids: np.ndarray,
        segment_ids: np.ndarray,
        positions: np.ndarray,
        segments: int = 1,
    ) -> jax.Array:
        """Starts a batch and returns at once, but for the compiling of a shape that comes for the first time.

        Args:
          token_ids: int32[B, T].
          segment_ids: int32[B, T], 0 for padding, 1 … `segments` for the texts of a row.
          positions: int32[B, T], counting from 0 in each text; anything valid at padding.
          segments: most texts in a row.

        Returns:
          What `fetch` takes. The arrays may be changed again.

        Raises:
          InvalidInput: a token, segment or position out of range.
          ValueError: a wrong shape or type.
          OutOfDeviceMemory: the program or the batch does not fit.
        """
        inputs = self._check_batch(token_ids, segment_ids, positions, segments)
        _, B, T = inputs.shape
        with _memory_faults():
            program = self._programs.get((B, T, segments)) or self._compile(B, T, segments)
            pooled = program(self._parameters, jax.device_put(inputs, by_rows(self._mesh)))
            # Few of the places are taken as a rule: the others need not travel to the host. In powers of two,
            # since each number is one more (tiny) program.
            taken = 1 << max(int(segment_ids.max()) - 1, 0).bit_length()
            return pooled[:, :taken] if taken < segments else pooled

    def fetch(self, handle: jax.Array) -> np.ndarray:
        """float32[B, S, D]: a vector for each text, pooled but not normalised; zeros where there is none.

        S is at most the `segments` of the batch, and at least the number of texts in its fullest row.

        Raises:
          OutOfDeviceMemory: the batch did not fit.
        """
        with _memory_faults():
            return np.asarray(handle)

    def close(self) -> None:
        """Frees the device's memory; nothing can be dispatched any more."""
        for parameter in self._parameters:
            parameter.delete()
        self._programs.clear()
        self._shapes = frozenset()

    def _check_batch(
        self, token_ids: np.ndarray, segment_ids: np.ndarray, positions: np.ndarray, segments: int
    ) -> np.ndarray:
        """The arrays in one, int32[3, B, T]: one transfer instead of three, and a copy of what the caller owns."""
        if token_ids.shape not in self._shapes:
            expected = (
                ", ".join(f"{B}x{T}" for B, T in sorted(self._shapes)) or "none: it is closed"
            )
            raise ValueError(
                f"token_ids: expected a shape the model was loaded for ({expected}), got {list(token_ids.shape)}"
            )
        if segments < 1:
            raise ValueError(f"segments: expected 1 or more, got {segments}")
        limits = {
            "token_ids": (token_ids, self.config.vocabulary_size),
            "segment_ids": (segment_ids, segments + 1),
            "positions": (positions, self.config.positions),
        }
        for name, (array, limit) in limits.items():
            if array.dtype != np.int32 or array.shape != token_ids.shape:
                raise ValueError(
                    f"{name}: expected int32{list(token_ids.shape)} as of token_ids, got {array.dtype}{list(array.shape)}"
                )
            low, high = int(array.min()), int(array.max())
            if low < 0 or high >= limit:
                raise InvalidInput(
                    f"{name}: expected 0 to {limit - 1}, got {low if low < 0 else high}"
                )
        return np.stack([token_ids, segment_ids, positions])

    def _compile(self, B: int, T: int, segments: int) -> Callable[..., jax.Array]:
        started = time.perf_counter()
        lowered = lower(
            self._network,
            self._parameters,
            self._mesh,
            (B, T),
            attention=self._attention,
            pooling=self.config.pooling,
            segments=segments,
        )
        program = self._programs[B, T, segments] = lowered.compile()
        self.compile_seconds += time.perf_counter() - started
        return program


def _place(
    state: nnx.State[Any, Any], weights: Mapping[Any, np.ndarray], mesh: Mesh
) -> list[jax.Array]:
    """Copies the weights to every device of the mesh, in the types that the network declares."""
    placed = {
        path: variable.replace(
            jax.device_put(weights[path].astype(variable.dtype), everywhere(mesh))
        )
        for path, variable in dict(nnx.to_flat_state(state)).items()
    }
    parameters: list[jax.Array] = jax.tree.leaves(nnx.from_flat_state(placed))
    for parameter in parameters:
        if parameter.devices() != set(mesh.devices.flat):
            raise DeviceError(
                f"parameters: expected on {mesh.devices.tolist()}, found on {parameter.devices()}"
            )
    return parameters


@contextmanager
def _memory_faults() -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # The status is all that XLA gives to tell errors apart; compilers out of memory use it too.
        if "RESOURCE_EXHAUSTED" in str(error):
            raise OutOfDeviceMemory(str(error)) from error
        raise
