"""Reading one file in a test, the way the pipeline does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from pipeline.config import ReadingSettings
from pipeline.listing import list_units
from pipeline.reading import read_unit
from pipeline.records import Chunk, Document, Failure, WorkUnit


def settings_for(*paths: Path | str, **settings: object) -> ReadingSettings:
    return ReadingSettings(inputs=tuple(str(path) for path in paths), **settings)


def unit_of(path: Path, **settings: object) -> WorkUnit:
    [unit] = list_units(settings_for(path, **settings)).units
    return unit


def read_chunks(
    path: Path, *, fields: Sequence[pa.Field] = (), done: Collection[int] = (), **settings: object
) -> list[Chunk]:
    reading = settings_for(path, **settings)
    return [
        chunk
        for unit in list_units(reading).units
        for chunk in read_unit(replace(unit, done=sorted(done)), reading, fields)
    ]


def outcomes(chunks: Sequence[Chunk]) -> tuple[list[Document], list[Failure]]:
    documents = [document for chunk in chunks for document in chunk.documents]
    failures = [failure for chunk in chunks for failure in chunk.failures]
    return documents, failures


def read(path: Path, **given: object) -> tuple[list[Document], list[Failure]]:
    """The documents and failures of a file, after checking that its completions count them all."""
    chunks = read_chunks(path, **given)  # type: ignore[arg-type]
    documents, failures = outcomes(chunks)
    completions = [completion for chunk in chunks for completion in chunk.completions]
    done = len(set(given.get("done", ())))  # type: ignore[call-overload]
    units = len({completion.unit_id for completion in completions})
    assert len(completions) == units, "a unit was completed twice"
    assert (
        sum(completion.records for completion in completions)
        == len(documents) + len(failures) + done * units
    )
    keys = [(one.unit_id, one.position) for one in (*documents, *failures)]
    assert len(set(keys)) == len(keys), "a position was given twice"
    return documents, failures


def texts(path: Path, **given: object) -> list[str]:
    """The texts of a file that has no failures."""
    documents, failures = read(path, **given)
    assert failures == []
    return [document.text for document in documents]


def reason(path: Path, **given: object) -> str:
    """The reason of a file's only failure."""
    _, [failure] = read(path, **given)
    return failure.reason
