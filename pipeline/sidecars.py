"""A staged file's sidecar: one JSON file that says all there is to know about it, and whose presence commits it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline import storage
from pipeline.records import Completion, Failure, Figures

VERSION = 1
SUFFIX = ".json"


class SidecarError(ValueError):
    """A sidecar that cannot be read; what it stands for does not count."""


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """What one staged file holds. `file` is None where there were failures or completions but no rows.

    `units` [rows] indexes `unit_ids`; with `positions` [rows] and `document_ids` [rows] it names the document of each row,
    in the file's order. All three are empty where `file` is None.
    """

    path: str
    file: str | None  # name of the Parquet file in the sidecar's folder
    size_bytes: int
    fingerprint: str
    run_id: str
    unit_ids: tuple[str, ...]
    units: np.ndarray  # int64
    positions: np.ndarray  # int64
    document_ids: pa.Array  # string
    failures: tuple[Failure, ...]
    completions: tuple[Completion, ...]
    figures: Figures

    @property
    def rows(self) -> int:
        return len(self.document_ids)

    @property
    def file_path(self) -> str:
        assert self.file is not None
        return storage.join(self.path.rpartition("/")[0], self.file)


def write(
    path: str,
    *,
    file: str | None,
    size_bytes: int,
    fingerprint: str,
    run_id: str,
    keys: Sequence[tuple[str, int, str]],
    failures: Sequence[Failure],
    completions: Sequence[Completion],
    figures: Figures,
) -> None:
    """Commits a staged file by writing its sidecar, whole or not at all."""
    numbers: dict[str, int] = {}
    units = [numbers.setdefault(unit_id, len(numbers)) for unit_id, _, _ in keys]
    data = {
        "version": VERSION,
        "file": file,
        "size_bytes": size_bytes,
        "fingerprint": fingerprint,
        "run_id": run_id,
        "unit_ids": list(numbers),
        "documents": {
            "unit": units,
            "position": [position for _, position, _ in keys],
            "document_id": [document_id for _, _, document_id in keys],
        },
        "failures": [asdict(failure) for failure in failures],
        "completions": [asdict(completion) for completion in completions],
        "figures": figures.to_json(),
    }
    storage.write(path, json.dumps(data, separators=(",", ":")).encode())


def read(path: str) -> Sidecar:
    """The sidecar at a path.

    Raises:
      SidecarError: it is not there, not whole, or not of a kind this version knows.
    """
    try:
        return _parse(path, json.loads(storage.read(path)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
        raise SidecarError(f"{path}: expected a sidecar of version {VERSION}: {error!r}") from error


def _parse(path: str, data: dict[str, Any]) -> Sidecar:
    if data["version"] != VERSION:
        raise ValueError(f"got version {data['version']}")
    file = data["file"]
    if file is not None and storage.name_of(file) != file:
        raise ValueError(f"file {file!r} lies in another folder")
    documents = data["documents"]
    sidecar = Sidecar(
        path=path,
        file=file,
        size_bytes=int(data["size_bytes"]),
        fingerprint=str(data["fingerprint"]),
        run_id=str(data["run_id"]),
        unit_ids=tuple(data["unit_ids"]),
        units=np.array(documents["unit"], np.int64),
        positions=np.array(documents["position"], np.int64),
        document_ids=pa.array(documents["document_id"], pa.string()),
        failures=tuple(Failure(**failure) for failure in data["failures"]),
        completions=tuple(Completion(**completion) for completion in data["completions"]),
        figures=Figures.from_json(data["figures"]),
    )
    if not len(sidecar.units) == len(sidecar.positions) == sidecar.rows:
        raise ValueError("its lists differ in length")
    if sidecar.rows and not 0 <= sidecar.units.min() <= sidecar.units.max() < len(sidecar.unit_ids):
        raise ValueError("a document names a work unit that is not there")
    if (file is None) != (sidecar.rows == 0):
        raise ValueError(f"{sidecar.rows} documents, but file {file!r}")
    return sidecar
