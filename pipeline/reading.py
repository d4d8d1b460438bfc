"""Read: a work unit → chunks of its documents, whatever its format."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import BinaryIO

import apache_beam as beam
import pyarrow as pa

from pipeline.config import ReadingSettings
from pipeline.decoding import jsonl, parquet, text
from pipeline.decoding.fields import kept_fields
from pipeline.decoding.lines import first_line_search
from pipeline.decoding.origin import Origin, Outcome
from pipeline.decompressing import blocks
from pipeline.formats import (
    HEAD_BYTES,
    MEDIA_TYPES,
    UNKNOWN,
    compression_by_content,
    expected_names,
)
from pipeline.objects import ObjectError, OpenObject
from pipeline.progress import Control, Stopped, busy
from pipeline.records import (
    MAX_CHUNK_BYTES,
    MAX_CHUNK_RECORDS,
    Chunk,
    Completion,
    Document,
    Failure,
    Figures,
    Run,
    WorkUnit,
)

# Faults of this machine, not of a file: they end the run rather than make failures of good documents.
_MACHINE_FAULTS = {errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM, errno.EDQUOT}


def read_unit(
    unit: WorkUnit,
    settings: ReadingSettings,
    fields: Sequence[pa.Field],
    check: Callable[[], None] = lambda: None,
) -> Iterator[Chunk]:
    """The unit's documents and failures in order of position, in chunks; the last one has the Completion.

    Positions in `unit.done` are counted, not given. `fields` are the kept fields, with their types. A fault of
    the whole object, or of its rest, is one failure with record None. What is given comes from the content that
    was listed: when the object has been changed since, nothing more of it is given. `check` is called every so often, also where nothing is given for
    long: what it raises ends the reading.
    """
    origin = Origin(
        unit_id=unit.unit_id,
        uri=unit.uri,
        media_type=MEDIA_TYPES[unit.format],
        settings=settings,
        fields=fields,
    )
    emitted = 0
    batches = _batches(unit, origin, check)
    while True:
        figures = Figures()
        with busy(figures, "read"):
            outcomes, last = next(batches)
            emitted += len(outcomes)
            figures.counts["read"] = len(outcomes)
        yield Chunk(
            documents=tuple(outcome for outcome in outcomes if isinstance(outcome, Document)),
            failures=tuple(outcome for outcome in outcomes if isinstance(outcome, Failure)),
            # A done position counts even if a fault has come before it since: its row is kept.
            completions=(Completion(unit_id=origin.unit_id, records=emitted + len(unit.done)),)
            if last
            else (),
            figures=figures,
        )
        if last:
            return


def _batches(
    unit: WorkUnit, origin: Origin, check: Callable[[], None]
) -> Iterator[tuple[list[Outcome], bool]]:
    """Outcomes for one chunk each, and whether it is the last one."""
    try:
        if unit.format == UNKNOWN:
            raise ObjectError(
                "unsupported_format",
                f"expected a name that ends in {expected_names()}; --format FORMAT reads files of any name",
            )
        with OpenObject(unit.uri, size_bytes=unit.size_bytes, generation=unit.generation) as source:
            outcomes = _outcomes(unit, origin, source.file, check)
            last = False
            while not last:
                batch, last, fault = _take(outcomes, unit, check)
                source.check(last=last)
                if fault is not None:
                    batch.extend(_object_failure(fault, unit, origin))
                yield batch, last
    except (ObjectError, OSError) as error:
        yield _object_failure(error, unit, origin), True


def _take(
    outcomes: Iterator[Outcome], unit: WorkUnit, check: Callable[[], None]
) -> tuple[list[Outcome], bool, ObjectError | OSError | None]:
    """The next outcomes, whether they are the last, and the fault that ended them."""
    batch: list[Outcome] = []
    size = passed_over = 0
    try:
        for outcome in outcomes:
            if unit.is_done(outcome.position):
                passed_over += 1
                if passed_over % MAX_CHUNK_RECORDS == 0:
                    check()
                continue
            batch.append(outcome)
            if isinstance(outcome, Document):
                size += outcome.size_bytes
            if size >= MAX_CHUNK_BYTES or len(batch) >= MAX_CHUNK_RECORDS:
                return batch, False, None
    except (ObjectError, OSError) as fault:
        return batch, True, fault
    return batch, True, None


def _object_failure(fault: ObjectError | OSError, unit: WorkUnit, origin: Origin) -> list[Outcome]:
    if not isinstance(fault, ObjectError):
        if fault.errno is None or fault.errno in _MACHINE_FAULTS:
            raise fault
        fault = ObjectError("unreadable_object", f"cannot read {unit.uri}: {fault.strerror}")
    if unit.is_done(fault.position):
        return []
    return [origin.failure(fault.position, None, fault.reason, fault.message, step="read")]


def _outcomes(
    unit: WorkUnit, origin: Origin, file: BinaryIO, check: Callable[[], None]
) -> Iterator[Outcome]:
    compression = compression_by_content(file.read(HEAD_BYTES), unit.compression)
    file.seek(0)
    if unit.format == "parquet":
        with parquet.opened(file, compression, check) as opened:
            yield from parquet.documents(opened, origin, unit.start, unit.stop)
        return
    plain = blocks(file, compression, check)
    if unit.format != "jsonl":
        yield from text.documents(plain, origin)
        return
    head = b""
    while len(head) < text.MARK_BYTES and (block := next(plain, b"")):
        head += block
    encoding, mark = text.detect(head, origin.settings.encoding)
    first = 0
    if unit.start > 0:  # ranges are of uncompressed files
        first = first_line_search(unit.start, text.newline_of(encoding))
        file.seek(first)
    else:
        plain = chain([head], plain)
    yield from jsonl.documents(
        plain, origin, encoding=encoding, mark=mark, first=first, start=unit.start, stop=unit.stop
    )


@beam.typehints.with_output_types(Chunk)
class Read(beam.DoFn):
    """WorkUnit → its Chunks. When the run is asked to stop it ends a unit early, without a Completion."""

    def __init__(self, run: Run) -> None:
        self._settings = run.job.reading
        self._fields = [run.schema.field(name) for name, _ in kept_fields(run.job.reading)]
        self._control = Control(run.control)

    def process(self, unit: WorkUnit) -> Iterator[Chunk]:
        check = self._control.raise_if_stopping
        with suppress(Stopped):
            check()
            for chunk in read_unit(unit, self._settings, self._fields, check):
                yield chunk
                check()
