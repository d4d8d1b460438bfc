"""Loaded models, shared by the tests of a session since each takes a second or more."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from model.predictor import Predictor

Load = Callable[..., Predictor]


@pytest.fixture(scope="session")
def load_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """load_model(checkpoint, shapes, dtype): a Predictor on the CPU, the same one for the same arguments."""
    loaded = []

    @functools.cache
    def load(
        checkpoint: Path, shapes: tuple[tuple[int, int], ...], dtype: str = "float32"
    ) -> Predictor:
        predictor = Predictor(
            checkpoint, task="embed", device="cpu", dtype=dtype, attention="auto", shapes=shapes
        )
        loaded.append(predictor)
        return predictor

    yield load
    for predictor in loaded:
        predictor.close()
