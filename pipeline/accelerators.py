"""What a Dataflow worker is made of, by the name of its accelerator.

As of December 2026; none of it has been tried on the service yet. Check against Dataflow's guides to TPUs
(https://cloud.google.com/dataflow/docs/tpu/use-tpus) and GPUs (https://cloud.google.com/dataflow/docs/gpu/gpu-support).
Larger v6e slices and v5p could not be confirmed and are left out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    device: str  # cpu | gpu | tpu
    dtype: str  # what --dtype auto means there
    machine_type: str
    kind: str | None = None  # Dataflow's worker_accelerator
    local_devices: int = 1  # that the one process of a worker drives
    disk_gb: int = 200  # holds the image, whose libraries take several GB
    threads: int = 4  # of the process: some prepare Loads while one has the device

    def beam_options(self) -> list[str]:
        """Flags of Beam. One process a worker, since one process owns the device, and one model in memory is enough."""
        accelerator = [f"--dataflow_service_options=worker_accelerator={self.kind}"]
        return [
            *(accelerator if self.kind is not None else []),
            f"--machine_type={self.machine_type}",
            f"--disk_size_gb={self.disk_gb}",
            "--experiments=no_use_multiple_sdk_containers",
            f"--number_of_worker_harness_threads={self.threads}",
        ]


def _tpu(kind: str, topology: str, machine_type: str, chips: int) -> Accelerator:
    return Accelerator(
        device="tpu",
        dtype="bfloat16",
        machine_type=machine_type,
        kind=f"type:{kind};topology:{topology}",
        local_devices=chips,
    )


def _gpu(kind: str, machine_type: str, dtype: str = "bfloat16") -> Accelerator:
    return Accelerator(
        device="gpu",
        dtype=dtype,
        machine_type=machine_type,
        kind=f"type:{kind};count:1;install-nvidia-driver:5xx",
    )


ACCELERATORS = {
    "none": Accelerator(device="cpu", dtype="float32", machine_type="n2-standard-8", disk_gb=100),
    "v5e-1": _tpu("tpu-v5-lite-podslice", "1x1", "ct5lp-hightpu-1t", 1),
    "v5e-4": _tpu("tpu-v5-lite-podslice", "2x2", "ct5lp-hightpu-4t", 4),
    "v5e-8": _tpu("tpu-v5-lite-podslice", "2x4", "ct5lp-hightpu-8t", 8),
    "v6e-1": _tpu("tpu-v6e-slice", "1x1", "ct6e-standard-1t", 1),
    "t4": _gpu("nvidia-tesla-t4", "n1-standard-8", dtype="float32"),  # has no bfloat16
    "l4": _gpu("nvidia-l4", "g2-standard-8"),
    "a100": _gpu("nvidia-tesla-a100", "a2-highgpu-1g"),
    "h100": _gpu("nvidia-h100-80gb", "a3-highgpu-1g"),
}
