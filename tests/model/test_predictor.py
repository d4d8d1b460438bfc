"""What a Predictor computes and refuses, and how it treats the device."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from device_batches import device_batch
from model.checkpoint import CheckpointError
from model.devices import use_compilation_cache
from model.predictor import (
    DeviceError,
    OutOfDeviceMemory,
    Predictor,
    local_device_count,
    resolve_device,
    resolve_dtype,
)
from tiny_checkpoint import write_tiny_checkpoint

Load = Callable[..., Predictor]

SHAPES = ((4, 16), (8, 16), (2, 64))

# The same text in another row or shape: only the order of float32 sums differs. In bfloat16 that may tip the rounding of a
# matmul's input, one part in 256.
SAME = {"float32": 2e-5, "bfloat16": 5e-2}


@pytest.fixture(scope="module")
def texts() -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.integers(1, 30522, n).astype(np.int32) for n in (3, 16, 5, 9, 12, 4, 16, 7)]


def run(
    predictor: Predictor, rows: list[list[np.ndarray]], T: int, segments: int = 1
) -> np.ndarray:
    return predictor.fetch(predictor.dispatch(*device_batch(rows, T), segments))


def new(folder: Path, **changes: Any) -> Predictor:
    settings: dict[str, Any] = {
        "task": "embed", "device": "cpu", "dtype": "float32", "attention": "auto", "shapes": SHAPES,
    }  # fmt: skip
    return Predictor(folder, **settings | changes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_text_gives_the_same_alone_in_a_batch_and_in_another_shape(
    load_model: Load, tiny_checkpoint: Path, texts: list[np.ndarray], dtype: str
) -> None:
    predictor = load_model(tiny_checkpoint, SHAPES, dtype)
    together = run(predictor, [[text] for text in texts], 16)
    assert together.shape == (8, 1, 32) and together.dtype == np.float32
    for text, vector in zip(texts, together[:, 0], strict=True):
        alone = run(predictor, [[], [text], [], []], 16)
        longer = run(predictor, [[text], []], 64)
        assert np.abs(alone[1, 0] - vector).max() <= SAME[dtype]
        assert np.abs(longer[0, 0] - vector).max() <= SAME[dtype]
        assert not alone[[0, 2, 3]].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_that_share_a_row_give_the_same_as_in_rows_of_their_own(
    load_model: Load, tiny_checkpoint: Path, texts: list[np.ndarray], dtype: str
) -> None:
    predictor = load_model(tiny_checkpoint, SHAPES, dtype)
    separate = run(predictor, [[text] for text in texts], 16)[:, 0]
    packed = run(predictor, [texts[:5], texts[5:]], 64, segments=8)
    assert np.abs(packed[0, :5] - separate[:5]).max() <= SAME[dtype]
    assert np.abs(packed[1, :3] - separate[5:]).max() <= SAME[dtype]
    assert not packed[0, 5:].any() and not packed[1, 3:].any()


def test_places_that_no_row_of_the_batch_takes_stay_on_the_device(
    load_model: Load, tiny_checkpoint: Path, texts: list[np.ndarray]
) -> None:
    predictor = load_model(tiny_checkpoint, SHAPES)
    places = {0: 1, 1: 1, 2: 2, 3: 4, 5: 6}  # 6: all there are
    for number, taken in places.items():
        packed = run(predictor, [texts[:1], texts[:number]], 64, segments=6)
        assert packed.shape == (2, taken, 32)
    assert np.abs(packed[0, 0] - packed[1, 0]).max() <= SAME["float32"]
    assert packed[1, :5].any(-1).all() and not packed[0, 1:].any() and not packed[1, 5:].any()


def test_a_token_counts_and_so_does_its_place(load_model: Load, tiny_checkpoint: Path) -> None:
    predictor = load_model(tiny_checkpoint, SHAPES)
    text = np.array([101, 2003, 2023, 102])
    rows = [[text], [text[[0, 2, 1, 3]]], [text[:3]], [np.array([101, 2003, 2024, 102])]]
    vectors = run(predictor, rows, 16)[:, 0]
    assert all(np.abs(vectors[0] - other).max() > 0.01 for other in vectors[1:])


def test_there_is_one_compiled_program_for_each_shape_and_number_of_segments(
    tiny_checkpoint: Path, texts: list[np.ndarray]
) -> None:
    predictor = new(tiny_checkpoint)
    assert (predictor.compiled_programs, predictor.compile_seconds) == (0, 0)
    for _ in range(2):
        run(predictor, [[], [], [], []], 16)
        run(predictor, [[], []], 64)
        run(predictor, [texts[:2], []], 64, segments=2)
    assert predictor.compiled_programs == 3
    seconds = predictor.compile_seconds
    assert seconds > 0
    run(predictor, [[], []], 64)
    assert predictor.compile_seconds == seconds


def test_arrays_may_be_changed_once_a_batch_is_dispatched(
    load_model: Load, tiny_checkpoint: Path, texts: list[np.ndarray]
) -> None:
    predictor = load_model(tiny_checkpoint, SHAPES)
    expected = run(predictor, [[text] for text in texts], 16)
    arrays = device_batch([[text] for text in texts], 16)
    handles = []
    for _ in range(20):
        mine = [array.copy() for array in arrays]
        handles.append(predictor.dispatch(*mine))
        for array in mine:
            array[:] = 0
    for handle in handles:
        assert np.array_equal(predictor.fetch(handle), expected)


def wrong_calls() -> dict[str, tuple[Callable[[Predictor], Any], str]]:
    def call(changed: str = "", value: Any = 0, segments: int = 1) -> Callable[[Predictor], Any]:
        names = ("token_ids", "segment_ids", "positions")
        arrays = dict(zip(names, device_batch([[[1, 2]]] * 4, 16), strict=True))
        if isinstance(value, np.ndarray):
            arrays[changed] = value
        elif changed:
            arrays[changed][1, 1] = value
        return lambda predictor: predictor.dispatch(*arrays.values(), segments)

    zeros = lambda *shape: np.zeros(shape, np.int32)  # noqa: E731
    return {
        "an id beyond the vocabulary": (call("token_ids", 30522), r"token_ids: expected 0 to 30521, got 30522"),
        "a negative id": (call("token_ids", -1), "token_ids: expected 0 to 30521, got -1"),
        "a position beyond the limit": (call("positions", 128), "positions: expected 0 to 127, got 128"),
        "a segment beyond the number": (call("segment_ids", 2), "segment_ids: expected 0 to 1, got 2"),
        "no segments": (call(segments=0), "segments: expected 1 or more"),
        "another shape": (call("token_ids", zeros(4, 32)), r"expected a shape .*\(2x64, 4x16, 8x16\), got \[4, 32\]"),
        "shapes that differ": (call("positions", zeros(8, 16)), r"positions: expected int32\[4, 16\]"),
        "another type": (call("token_ids", np.zeros([4, 16])), r"token_ids: expected int32\[4, 16\].*got float64"),
    }  # fmt: skip


@pytest.mark.parametrize("call", wrong_calls())
def test_a_wrong_call_is_refused_with_what_was_expected(
    load_model: Load, tiny_checkpoint: Path, call: str
) -> None:
    do, message = wrong_calls()[call]
    with pytest.raises(ValueError, match=message):
        do(load_model(tiny_checkpoint, SHAPES))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "classify"}, "task: expected 'embed'"),
        ({"dtype": "float16"}, "dtype: expected one of float32, bfloat16 or auto"),
        ({"shapes": [(0, 16)]}, "shapes: expected B a multiple of the 1 local devices, got 0x16"),
    ],
)
def test_a_wrong_setting_is_refused(
    tiny_checkpoint: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        new(tiny_checkpoint, **changes)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"encoder\.layer\.2\.output\.dense\.bias: missing"):
        new(tmp_path)


def test_a_device_that_is_not_there_is_an_error_that_names_those_that_are(
    tiny_checkpoint: Path,
) -> None:
    absent = next(kind for kind in ("tpu", "gpu") if not local_device_count(kind))
    for ask in (lambda: resolve_device(absent), lambda: new(tiny_checkpoint, device=absent)):
        with pytest.raises(DeviceError, match=f"device '{absent}' is not present; .* finds .*cpu"):
            ask()


def test_auto_is_the_best_device_that_is_present() -> None:
    assert resolve_device("auto") == jax.default_backend()


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 amx_tile", "bfloat16"),
        ("flags\t\t: fpu avx512f avx512_bf16x", "float32"),
        ("Features\t: fp asimd bf16", "bfloat16"),
        ("model name\t: bf16", "float32"),
    ],
)
def test_auto_is_bfloat16_on_processors_that_multiply_it(
    monkeypatch: pytest.MonkeyPatch, cpuinfo: str, expected: str
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: f"processor\t: 0\n{cpuinfo}\n")
    assert resolve_dtype("auto", "cpu") == expected
    assert resolve_dtype("auto", "tpu") == resolve_dtype("auto", "gpu") == "bfloat16"
    assert resolve_dtype("float32", "tpu") == "float32"


def test_a_batch_that_does_not_fit_the_memory_is_told_apart_and_the_next_one_runs(
    tiny_checkpoint: Path,
) -> None:
    huge = (64, 2**16)  # attention weights alone: 4 TB
    predictor = new(tiny_checkpoint, shapes=[huge, (4, 16)])
    array = np.zeros(huge, np.int32)
    with pytest.raises(OutOfDeviceMemory, match="RESOURCE_EXHAUSTED"):
        predictor.fetch(predictor.dispatch(array, array, array))
    assert run(predictor, [[[1, 2]]] * 4, 16).shape == (4, 1, 32)


@pytest.mark.parametrize("status", ["INTERNAL", "UNAVAILABLE"])
def test_other_device_faults_are_raised_as_they_are(tiny_checkpoint: Path, status: str) -> None:
    predictor = new(tiny_checkpoint)

    def fail(*arguments: Any) -> None:
        raise jax.errors.JaxRuntimeError(f"{status}: the chip is gone")

    run(predictor, [[]] * 4, 16)
    predictor._programs[4, 16, 1] = fail
    with pytest.raises(jax.errors.JaxRuntimeError, match=status):
        run(predictor, [[]] * 4, 16)


def test_device_memory_is_free_after_close_and_when_the_predictor_is_dropped(
    tiny_checkpoint: Path,
) -> None:
    def live() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    before = live()
    predictor = new(tiny_checkpoint)
    run(predictor, [[]] * 4, 16)
    assert live() > before + 3e6  # the word embeddings
    predictor.close()
    assert live() <= before + 1e5
    with pytest.raises(ValueError, match="it is closed"):
        run(predictor, [[]] * 4, 16)

    predictor = new(tiny_checkpoint)
    run(predictor, [[]] * 4, 16)
    dead = weakref.ref(predictor)
    del predictor
    assert live() <= before + 1e5
    assert dead() is None


def test_several_threads_get_their_own_results_under_the_lock(
    tiny_checkpoint: Path, texts: list[np.ndarray]
) -> None:
    predictor = new(tiny_checkpoint)
    expected = run(predictor, [[text] for text in texts], 16)[:, 0]
    wrong = []

    def work(i: int) -> None:
        for _ in range(20):
            with predictor.lock:
                vector = run(predictor, [[texts[i]], [], [], []], 16)[0, 0]
            if np.abs(vector - expected[i]).max() > SAME["float32"]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=[i]) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert predictor.compiled_programs == 2


PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
import jax, numpy as np
from device_batches import device_batch
from model.predictor import Predictor
# A user's process may have compiled something before; and programs that compile in no time are kept, too.
jax.jit(lambda x: x + 1)(1)
def trivial(x):
    return x * 3
checkpoint, texts, result = sys.argv[1:]
texts = list(np.load(texts).values())
predictor = Predictor(
    Path(checkpoint), task="embed", device="cpu", dtype="float32", attention="auto", shapes=[(8, 16), (4, 64)]
)
jax.jit(trivial)(1)
separate = predictor.dispatch(*device_batch([[text] for text in texts], 16))
packed = predictor.dispatch(*device_batch([texts[:5], [], texts[5:], []], 64), 8)
np.savez(
    result, devices=predictor.local_devices, separate=predictor.fetch(separate), packed=predictor.fetch(packed)
)
"""


def test_four_devices_give_the_same_as_one_and_keep_their_programs_in_the_users_cache(
    load_model: Load, tiny_checkpoint: Path, texts: list[np.ndarray], tmp_path: Path
) -> None:
    np.savez(tmp_path / "texts.npz", *texts)
    arguments = [str(tiny_checkpoint), str(tmp_path / "texts.npz"), str(tmp_path / "result.npz")]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    subprocess.run([sys.executable, "-P", "-c", PROGRAM, *arguments], check=True, env=environment)
    four = np.load(tmp_path / "result.npz")
    assert four["devices"] == 4
    one = load_model(tiny_checkpoint, SHAPES)
    separate = run(one, [[text] for text in texts], 16)
    packed = run(one, [texts[:5], texts[5:]], 64, segments=8)
    assert np.abs(four["separate"] - separate).max() <= SAME["float32"]
    assert np.abs(four["packed"][[0, 2]] - packed).max() <= SAME["float32"]
    assert not four["packed"][[1, 3]].any()

    kept = [path.name for path in (tmp_path / "cache" / "lengthwise" / "xla").iterdir()]
    for program, number in {"forward": 2, "trivial": 1}.items():
        assert len([name for name in kept if program in name and name.endswith("-cache")]) == number


def test_a_second_predictor_reads_its_programs_from_the_cache(tiny_checkpoint: Path) -> None:
    events: Counter[str] = Counter()
    run(new(tiny_checkpoint), [[]] * 4, 16)
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
    try:
        predictor = new(tiny_checkpoint)
        before = events["/jax/compilation_cache/cache_hits"]
        run(predictor, [[]] * 4, 16)
        assert events["/jax/compilation_cache/cache_hits"] == before + 1
    finally:
        jax.monitoring.clear_event_listeners()


def test_a_cache_folder_that_is_set_in_jax_stays_set(tmp_path: Path) -> None:
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        use_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
