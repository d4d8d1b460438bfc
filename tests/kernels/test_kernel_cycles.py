"""The benchmark that counts static cycles says so when there is nothing to count, or too much."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kernels.attention.cycles import NotCounted, read_schedule

FILE = Path(__file__).parents[1] / "benchmarks" / "kernel_cycles.py"


@pytest.fixture(scope="module")
def benchmark() -> object:
    spec = importlib.util.spec_from_file_location("kernel_cycles", FILE)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "kernel_cycles", module)  # dataclasses look there
        spec.loader.exec_module(module)
    return module


def test_a_dump_without_the_kernel_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "1-fusion-1-schedule-analysis_final_bundles.txt").write_text("a fusion of XLA's")
    with pytest.raises(NotCounted, match="the kernel is not in the dump"):
        read_schedule(tmp_path)


def test_growth_by_more_than_3_percent_and_what_has_no_baseline_are_told(benchmark) -> None:
    stored = {"v5e H=32": 1000, "v6e H=32": 1000}
    assert benchmark.compare({"v5e H=32": 1030, "v6e H=32": 900}, stored, "0.1") == []
    grown, unknown = benchmark.compare({"v5e H=32": 1031, "v4 H=32": 1}, stored, "0.1")
    assert grown == "v5e H=32: 1031 cycles, over 3% more than the stored 1000"
    assert unknown == "v4 H=32: no baseline for libtpu 0.1 (--store writes it)"
