"""The records that travel through the pipeline, in the order in which they come to be.

Everything that travels after reading is an `Envelope`: besides its documents it carries the failures, the
completed work units and the figures of the steps behind it, so that the chain stays one line
and nothing is counted anywhere but in the data itself.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

    from pipeline.config import Job
    from pipeline.shapes import ShapeTable


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkUnit:
    """An object, or a range of one, that is read by one worker and finished as a whole.

    `start` and `stop` are byte offsets (JSON Lines) or row-group numbers (Parquet); a whole object
    has start 0 and stop None. `generation` identifies the object's content: GCS generation, etag, or
    mtime in nanoseconds; "" when the object was named but not found. `done` holds, sorted, the positions that an
    interrupted run has already written: the reader counts them but does not emit them. There may be millions, so they
    travel as an `array("q")`, 8 bytes each.
    """

    uri: str
    format: str  # text | markdown | jsonl | parquet
    compression: str  # none | gzip | bzip2 | zstd
    start: int
    stop: int | None
    size_bytes: int
    generation: str
    done: Sequence[int] = field(default=(), hash=False)

    @property
    def unit_id(self) -> str:
        """Names the unit and the content it had: the same in every run over unchanged input."""
        # The size as well: a copy that keeps its time of change may replace an object unnoticed.
        stop = "" if self.stop is None else self.stop
        return f"{self.uri}#{self.start}-{stop}@{self.generation}+{self.size_bytes}"

    def is_done(self, position: int) -> bool:
        index = bisect_left(self.done, position)
        return index < len(self.done) and self.done[index] == position


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One document as read. `position` (byte offset or row) is unique in its object; `record` is what users see:
    the id field where one is given, else the position as text."""

    unit_id: str
    position: int
    uri: str
    record: str
    text: str
    media_type: str
    content_sha256: str  # of the text's UTF-8 bytes
    size_bytes: int  # of the text's UTF-8 bytes
    fields: tuple[Any, ...] = ()  # values of --keep-fields, in their order

    @property
    def document_id(self) -> str:
        """128-bit hex digest of the object's uri and the record's name in it; stable from run to run."""
        return hashlib.sha256(f"{self.uri}\0{self.record}".encode()).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedDocument:
    """A document as the model takes it.

    `document.text` is emptied (the text is no longer needed); `token_ids` is int32[tokens] without special
    tokens; `windows` is int32[windows, 2], start and stop of each window in `token_ids`, special tokens not counted.
    """

    document: Document
    characters: int
    token_ids: np.ndarray
    windows: np.ndarray
    truncated: bool
    offsets: np.ndarray | None = None  # int32[tokens, 2], characters; only for tasks that need it

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


# Reasons that lie in the machine rather than in the record: an interrupted run's are tried again.
MACHINE_REASONS = frozenset({"unreadable_object", "out_of_device_memory"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why one record gave no row. `record` is None and `position` -1 where the object itself could not be read."""

    unit_id: str
    position: int
    uri: str
    record: str | None
    step: str  # read | decode | tokenize | infer
    reason: str  # a stable snake_case code
    message: str
    # Of the text where there is one, as in the document's row; else of the record's bytes; None where neither was read.
    content_sha256: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A work unit has been read to its end: it held `records` documents and failures, `done` ones included."""

    unit_id: str
    records: int


@dataclass(kw_only=True, slots=True)
class Figures:
    """Figures of the report, added up along the chain."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)  # busy seconds a step
    shapes: Counter[str] = field(default_factory=Counter)  # device batches a shape, "BxT"
    peaks: dict[str, float] = field(default_factory=dict)  # largest value seen
    lows: dict[str, float] = field(default_factory=dict)  # smallest value seen
    facts: dict[str, Any] = field(
        default_factory=dict
    )  # what a worker decided, e.g. the attention chosen

    def add(self, other: Figures) -> Figures:
        self.counts.update(other.counts)
        self.seconds.update(other.seconds)
        self.shapes.update(other.shapes)
        for name, value in other.peaks.items():
            self.peaks[name] = max(value, self.peaks.get(name, value))
        for name, value in other.lows.items():
            self.lows[name] = min(value, self.lows.get(name, value))
        self.facts.update(other.facts)
        return self

    @classmethod
    def total(cls, several: Iterable[Figures]) -> Figures:
        result = cls()
        for figures in several:
            result.add(figures)
        return result

    def to_json(self) -> dict[str, Any]:
        return {
            "counts": dict(self.counts),
            "seconds": dict(self.seconds),
            "shapes": dict(self.shapes),
            "peaks": self.peaks,
            "lows": self.lows,
            "facts": self.facts,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Figures:
        return cls(
            counts=Counter(data["counts"]),
            seconds=Counter(data["seconds"]),
            shapes=Counter(data["shapes"]),
            peaks=dict(data["peaks"]),
            lows=dict(data["lows"]),
            facts=dict(data["facts"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """What every element after reading carries beside its documents."""

    failures: tuple[Failure, ...] = ()
    completions: tuple[Completion, ...] = ()
    figures: Figures = field(default_factory=Figures)


MAX_CHUNK_RECORDS = 256
MAX_CHUNK_BYTES = 2**20  # of text; a larger document is a chunk of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk(Envelope):
    """Consecutive records of one work unit, bounded in bytes and number."""

    documents: tuple[Document, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    """Token ids put before and after every window, and the one that fills padding."""

    start_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()
    pad_id: int = 0

    def __len__(self) -> int:
        return len(self.start_ids) + len(self.end_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedChunk(Envelope):
    documents: tuple[TokenizedDocument, ...] = ()
    special: SpecialTokens = SpecialTokens()


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedBatch:
    """Where windows go in one device batch [B, T]; all arrays are int32[windows of this batch].

    `windows` numbers the Load's distinct windows in order of `Load.window_table`; `rows` and `columns` say where each starts.
    Windows that share a row are ordered by column: they are its segments 1, 2, …
    """

    B: int
    T: int
    windows: np.ndarray
    rows: np.ndarray
    columns: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Load(Envelope):
    """Whole documents and the plan that computes them: the element between batching and inference.

    `window_table` is int32[distinct windows, 3]: index of the first document with that text, start and stop in its token_ids.
    `first_window` is int32[documents]: the first row in `window_table` of each document; equal texts share theirs, so
    document i has `len(documents[i].windows)` rows from there.
    """

    documents: tuple[TokenizedDocument, ...] = ()
    window_table: np.ndarray
    first_window: np.ndarray
    batches: tuple[PlannedBatch, ...] = ()
    special: SpecialTokens = SpecialTokens()

    def __len__(self) -> int:
        return len(self.documents)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadResult(Envelope):
    """The documents of a Load that were computed, and one row of `encodings` (float32[documents, D]) for each."""

    documents: tuple[TokenizedDocument, ...] = ()
    encodings: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows(Envelope):
    """Rows ready to be written. `keys` names the document of each row: (unit_id, position, document_id)."""

    table: pa.Table
    keys: tuple[tuple[str, int, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedFile:
    """A closed, committed staging file, by its sidecar, which holds all there is to know about it."""

    sidecar: str
    rows: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything decided at launch, once; workers and the final step read it and decide nothing again."""

    job: Job
    run_id: str
    date: str  # YYYY-MM-DD
    started: float  # seconds since the epoch
    checkpoint: str  # where workers find it: a folder, also in a bucket, or package:NAME
    model_name: str
    fingerprint: str
    device: str  # cpu | gpu | tpu
    dtype: str  # float32 | bfloat16
    local_devices: int  # devices a worker process drives, data parallel
    window_tokens: int  # of a window, special tokens included
    shapes: ShapeTable  # of device batches
    schema: pa.Schema  # of the documents files
    listing: str  # staged listing: every work unit of the date
    hidden: int  # files that the listing left out because of their names
    todo: str  # staged listing: the work units, or parts of them, that `resumed` lacks
    manifest_version: int = (
        0  # in a bucket: the manifest that this run may replace (storage.version)
    )
    resumed: tuple[str, ...] = ()  # sidecars kept from interrupted runs
    base: str | None = None  # the published date that this run builds on
    unchanged: str | None = (
        None  # state of the base's objects that need not be computed; not in `listing`
    )
    deleted: int = 0  # objects of the base that are no longer listed
    control: str | None = None  # local folder of the stop flag and the progress counters
