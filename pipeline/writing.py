"""Write: rows → staged Parquet files, each committed by its sidecar the moment it is closed.

A kill at any time leaves whole, committed files and at most one temporary file a writer, which nobody reads.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, BinaryIO

import apache_beam as beam
import pyarrow as pa
import pyarrow.parquet as pq
from apache_beam.transforms.window import GlobalWindows
from apache_beam.utils.windowed_value import WindowedValue

from pipeline import sidecars, storage
from pipeline.assembling import METADATA_PREFIX
from pipeline.progress import busy
from pipeline.reconciling import failed_fast
from pipeline.records import Completion, Failure, Figures, Rows, Run, StagedFile
from pipeline.state import Layout

# A row group is what a reader fetches and decodes at once, and what a writer holds in memory (Arrow bytes).
ROW_GROUP_BYTES = 8 * 2**20

# A file is closed once it has been open for 2 % of the time since the writer started: a kill then loses a few
# percent of the work at any scale, while files grow in number only with the logarithm of the time (35 for each
# doubling, fewer than 500 in eight hours). Never sooner than a tenth of a second: to write, close and commit 500
# rows of 384 numbers takes 15 ms.
OPEN_SHARE = 0.02
OPEN_SECONDS = 0.1

RUN_SUFFIX = ".run"  # of the empty file that names a run in its staging folder


class RowGroupWriter:
    """A Parquet file that gathers small tables into row groups of about ROW_GROUP_BYTES."""

    def __init__(self, path: str, schema: pa.Schema) -> None:
        # Dictionaries and statistics of vectors would cost time and serve nobody.
        plain = [field.name for field in schema if not pa.types.is_fixed_size_list(field.type)]
        self._file: BinaryIO = storage.create(path)
        self._writer = pq.ParquetWriter(
            self._file, schema, compression="zstd", use_dictionary=plain, write_statistics=plain
        )
        self._schema = schema
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0

    @property
    def bytes(self) -> int:
        """Size so far, roughly: what waits for its row group counts uncompressed."""
        return self._file.tell() + self._waiting_bytes

    def write(self, table: pa.Table) -> None:
        self._waiting.append(table)
        self._waiting_bytes += table.nbytes
        if self._waiting_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.concat_tables(self._waiting))
        self._waiting, self._waiting_bytes = [], 0

    def close(self, metadata: Mapping[str, str]) -> int:
        """Ends the file, with more metadata where some is known by now; returns its size in bytes."""
        self._flush()
        if metadata:
            self._writer.add_key_value_metadata(dict(metadata))
        self._writer.close()
        size = self._file.tell()
        self._file.close()
        return size

    def abort(self) -> None:
        """Ends the file without what waits; it does not count."""
        self._waiting = []
        with suppress(Exception):  # no space for the footer, say
            self._writer.close()
        with suppress(Exception):  # each filesystem has its own
            self._file.close()


class StagedFiles:
    """Writes rows into staged files one after the other; not for several threads at once.

    Several writers, in any number of threads and processes, may share a folder: each name is used once.
    """

    def __init__(
        self,
        folder: str,
        *,
        schema: pa.Schema,
        run_id: str,
        fingerprint: str,
        max_rows: int,
        max_bytes: int,
    ) -> None:
        self._folder = folder
        self._schema = schema
        self._run_id = run_id
        self._fingerprint = fingerprint
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._started = self._last_end = time.monotonic()
        self._facts: dict[str, Any] = {}
        self._begin()

    def _begin(self) -> None:
        self._opened: float | None = None
        self._name = f"{self._run_id}-{uuid.uuid4().hex[:12]}"
        self._parquet: RowGroupWriter | None = None
        self._keys: list[tuple[str, int, str]] = []
        self._failures: list[Failure] = []
        self._completions: list[Completion] = []
        self._figures = Figures()

    @property
    def _temporary(self) -> str:
        return storage.join(self._folder, f"{storage.TEMPORARY}{self._name}.parquet")

    def add(self, rows: Rows) -> Iterator[StagedFile]:
        """Takes rows in; gives the files that were closed by that."""
        now = time.monotonic()
        gap = now - self._last_end
        start, total = 0, rows.table.num_rows
        while True:
            if self._opened is None:
                self._opened = now
            stop = min(total, start + self._max_rows - len(self._keys))
            with busy(self._figures, "write"):
                self._append(rows, start, stop)
            start = stop
            if start == total:
                break
            yield self._commit()
        # A completion goes out no earlier than the rows that came with it.
        self._failures += rows.failures
        self._completions += rows.completions
        self._figures.add(rows.figures)
        self._facts |= rows.figures.facts
        self._last_end = time.monotonic()
        # Rows may come more slowly than files are to be closed: so this one also closes if it would be too old by the next.
        age = self._last_end - self._opened + gap
        if (
            age >= max(OPEN_SECONDS, OPEN_SHARE * (self._last_end - self._started))
            or len(self._keys) >= self._max_rows
            or (self._parquet is not None and self._parquet.bytes >= self._max_bytes)
        ):
            yield self._commit()

    def _append(self, rows: Rows, start: int, stop: int) -> None:
        if start == stop:
            return
        if self._parquet is None:
            self._parquet = RowGroupWriter(self._temporary, self._schema)
        self._parquet.write(rows.table.slice(start, stop - start))
        self._keys += rows.keys[start:stop]

    def close(self) -> Iterator[StagedFile]:
        """Closes the open file, if there is one."""
        if self._opened is not None:
            yield self._commit()

    def _commit(self) -> StagedFile:
        name, size = None, 0
        if self._parquet is not None:
            with busy(self._figures, "write"):
                size = self._parquet.close(attention_metadata([self._facts]))
                name = f"{self._name}.parquet"
                storage.move(self._temporary, storage.join(self._folder, name))
        sidecar = storage.join(self._folder, self._name + sidecars.SUFFIX)
        sidecars.write(
            sidecar,
            file=name,
            size_bytes=size,
            fingerprint=self._fingerprint,
            run_id=self._run_id,
            keys=self._keys,
            failures=self._failures,
            completions=self._completions,
            figures=self._figures,
        )
        staged = StagedFile(sidecar=sidecar, rows=len(self._keys), size_bytes=size)
        self._begin()
        return staged

    def abort(self) -> None:
        """Leaves the open file uncommitted and takes its temporary file away."""
        if self._parquet is not None:
            self._parquet.abort()
            storage.delete(self._temporary)
        self._begin()


def attention_metadata(facts: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """File metadata that only workers know: the attention implementations that were chosen, and why not others."""
    chosen, reasons = set(), set()
    for known in facts:
        chosen |= {known["attention"]} if "attention" in known else set()
        reasons |= {f"{name}: {why}" for name, why in known.get("attention_reasons", {}).items()}
    texts = {
        "attention": ", ".join(sorted(chosen)),
        "attention_reasons": "; ".join(sorted(reasons)),
    }
    return {METADATA_PREFIX + name: text for name, text in texts.items() if text}


@beam.typehints.with_input_types(Rows)
@beam.typehints.with_output_types(StagedFile)
class Write(beam.DoFn):
    """Rows → StagedFile, one for each file closed."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._files: StagedFiles | None = None

    def setup(self) -> None:
        run = self._run
        folder = Layout(run.job.output.output, run.date).staged(run.fingerprint)
        # Tells later runs of the same fingerprint that this one has worked here, even if it leaves nothing.
        storage.write(storage.join(folder, run.run_id + RUN_SUFFIX), b"")
        self._files = StagedFiles(
            folder,
            schema=run.schema,
            run_id=run.run_id,
            fingerprint=run.fingerprint,
            max_rows=run.job.output.max_rows_per_file,
            max_bytes=run.job.output.max_bytes_per_file,
        )

    def process(self, rows: Rows) -> Iterator[StagedFile]:
        assert self._files is not None
        if rows.failures and self._run.job.output.fail_fast:
            # What was computed is kept; without failure and completions the unit is read again by the next run.
            kept = replace(rows, failures=(), completions=())
            for _ in (*self._files.add(kept), *self._files.close()):
                pass
            raise failed_fast(rows.failures[0])
        yield from self._files.add(rows)

    def finish_bundle(self) -> Iterator[WindowedValue]:
        assert self._files is not None
        for staged in self._files.close():
            yield GlobalWindows.windowed_value(staged)

    def teardown(self) -> None:
        if self._files is not None:
            self._files.abort()
