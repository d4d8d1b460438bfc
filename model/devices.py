"""What this process computes on: devices, the type they multiply best, and their compiled programs' cache."""

from __future__ import annotations

import os
from pathlib import Path

import jax

AUTO = "auto"
DEVICES = ("tpu", "gpu", "cpu")  # in order of preference
DTYPES = ("float32", "bfloat16")

# Processors that multiply bfloat16: names of these flags in /proc/cpuinfo (the last is Arm's).
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


class DeviceError(RuntimeError):
    """The device asked for is not there, or does not start."""


def resolve_device(device: str) -> str:
    """ "cpu", "gpu" or "tpu"; "auto" is the best of those present.

    Raises:
      DeviceError: it is not present. Nothing else is taken in its place.
    """
    present = [kind for kind in DEVICES if local_devices(kind)]
    if device == AUTO and present:
        return present[0]
    if device not in present:
        limited = os.environ.get("JAX_PLATFORMS")
        hint = f" (JAX_PLATFORMS={limited} hides others)" if limited else ""
        raise DeviceError(
            f"device {device!r} is not present; JAX {jax.__version__} finds {', '.join(present) or 'none'}{hint}"
        )
    return device


def local_device_count(device: str) -> int:
    """How many devices of the kind a Predictor in this process uses."""
    return len(local_devices(device))


def resolve_dtype(dtype: str, device: str) -> str:
    """ "float32" or "bfloat16"; "auto" is bfloat16 where the device multiplies it, else float32."""
    if dtype != AUTO:
        if dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)} or auto, got {dtype!r}")
        return dtype
    return "bfloat16" if device != "cpu" or _cpu_multiplies_bfloat16() else "float32"


def local_devices(kind: str) -> list[jax.Device]:
    """This process's devices of a kind; empty where there is none.

    Raises:
      DeviceError: there should be one, but it does not start. Another process may have it.
    """
    try:
        devices: list[jax.Device] = jax.local_devices(backend=kind)
    except RuntimeError as error:
        # Raised where JAX was told what to use, and on TPU machines it tells itself. Without this a TPU that is busy
        # would look like none (https://github.com/jax-ml/jax/issues/22070).
        if "Unable to initialize backend" in str(error):
            raise DeviceError(
                f"a device that should be there does not start: {error}; wait for it, or ask for another"
            ) from error
        return []  # JAX's way to say that there is no such backend
    return devices


def _cpu_multiplies_bfloat16() -> bool:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    flags = {
        flag
        for line in lines
        if line.lower().startswith(("flags", "features"))
        for flag in line.split()
    }
    return not BFLOAT16_FLAGS.isdisjoint(flags)


def use_compilation_cache() -> None:
    """Keeps compiled programs from run to run in the user's cache folder, unless a folder is set in JAX."""
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "lengthwise", "xla").expanduser()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # By default programs that compile in under a second, such as ours on CPU, are not kept.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
