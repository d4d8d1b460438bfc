"""Fixtures that tests of all three packages share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

# Import mode importlib keeps this folder off sys.path; subprocess scripts and fixtures share the module.
sys.path.insert(0, str(Path(__file__).parent))

from tiny_checkpoint import minilm_folder, write_tiny_checkpoint

# Shapes and types in the network's signatures are checked in every test that runs it, whichever imports it first.
install_import_hook(("model.encoder", "model.heads"), "beartype.beartype")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random BERT checkpoint (see tiny_checkpoint.py). Do not change its files."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Folder of the embedded all-MiniLM-L6-v2 checkpoint."""
    return minilm_folder()
