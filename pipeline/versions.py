"""Versions of what decides results: Python, this distribution and the libraries under it."""

from __future__ import annotations

import platform
from importlib import metadata

DISTRIBUTIONS = (
    "lengthwise",
    "apache-beam",
    "jax",
    "jaxlib",
    "libtpu",
    "flax",
    "numpy",
    "pyarrow",
    "tensorflow",
    "tensorflow-text",
    "google-cloud-storage",
)


def versions() -> dict[str, str]:
    """Name → version of each that is installed, read from metadata: nothing is imported."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
