"""List: what the user names → objects → work units, in an order that is the same every time."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import objects, storage
from pipeline.config import ReadingSettings, SettingsError
from pipeline.decoding import parquet
from pipeline.decoding.fields import column_type, kept_fields
from pipeline.decoding.text import detect, newline_of
from pipeline.formats import HEAD_BYTES, UNKNOWN, by_name, compression_by_content, expected_names
from pipeline.objects import ObjectError, OpenObject, StoredObject
from pipeline.patterns import WILDCARDS, Glob, expand_braces, is_hidden
from pipeline.records import WorkUnit

_LISTING_SCHEMA = pa.schema(
    [
        pa.field("uri", pa.string(), nullable=False),
        pa.field("format", pa.string(), nullable=False),
        pa.field("compression", pa.string(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("stop", pa.int64()),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("generation", pa.string(), nullable=False),
        pa.field("done", pa.list_(pa.int64()), nullable=False),
    ]
)
# Bounds of what is written, and read, at once.
_UNITS_PER_GROUP = 1000
_POSITIONS_PER_GROUP = 2**18


@dataclass(frozen=True, slots=True)
class Listing:
    """The work units of all inputs, ordered by uri and start, and how many hidden files were left out."""

    units: tuple[WorkUnit, ...]
    hidden: int


def list_units(settings: ReadingSettings) -> Listing:
    """Finds every input object, once, and divides the large ones.

    Raises:
      SettingsError: an input or manifest cannot be listed, matches nothing (unless `allow_empty`), or no file
        found is of a known format.
    """
    found: dict[str, StoredObject] = {}
    hidden: set[str] = set()
    for pattern in settings.inputs:
        try:
            matches = list(_matches(pattern))
        except (OSError, ValueError) as error:  # ValueError: a scheme that no filesystem serves
            raise SettingsError(f"--input {pattern}: cannot be listed: {error}") from None
        seen = {listed.uri: listed for listed, left_out in matches if not left_out}
        hidden.update(listed.uri for listed, left_out in matches if left_out)
        if not seen and not settings.allow_empty:
            but = (
                f" but {len(matches)} hidden files (names that begin with . or _)"
                if matches
                else ""
            )
            raise SettingsError(
                f"--input {pattern}: expected at least one file, found none{but}; "
                "correct the path, or give --allow-empty"
            )
        found.update(seen)
    if settings.manifest is not None:
        found.update((listed.uri, listed) for listed in _manifest(settings))
    units = [unit for _, listed in sorted(found.items()) for unit in _units(listed, settings)]
    if units and all(unit.format == UNKNOWN for unit in units):
        raise SettingsError(
            f"no input file has a known format ({units[0].uri}{' and others' if len(units) > 1 else ''}): expected "
            f"names that end in {expected_names()}; --format FORMAT reads files of any name"
        )
    return Listing(tuple(units), len(hidden - found.keys()))


def _matches(pattern: str) -> Iterator[tuple[StoredObject, bool]]:
    """What an input means: a file, a folder's files, or a glob's; and whether each is hidden.

    The name of an existing file or folder is taken as it stands, also at the beginning of a pattern.
    """
    path = objects.absolute(pattern)
    if objects.is_file(path) and not pattern.endswith("/"):
        yield objects.look(path), False
        return
    if objects.is_folder(path):
        for relative, listed in objects.below(path):
            yield listed, is_hidden(relative)
        return
    root, rest = _literal_root(path)
    if WILDCARDS.search(rest) is None:
        return
    rest += "/" if pattern.endswith("/") else ""
    expanded = expand_braces(rest)
    if expanded != [rest]:
        for one in expanded:
            yield from _matches(f"{root.rstrip('/')}/{one}")
        return
    glob = Glob(rest)
    plain, with_hidden = glob.compile()
    for relative, listed in objects.below(root.rstrip("/") or "/", glob.depth):
        if plain.fullmatch(relative):
            yield listed, False
        elif with_hidden.fullmatch(relative):
            yield listed, True


def _literal_root(path: str) -> tuple[str, str]:
    """The longest folder at the beginning of a pattern that exists, or has no wildcards; and the rest."""
    if storage.is_local(path):
        root, rest = "/", path.lstrip("/")
        first = 0
    else:
        names = path.split("/")
        root, rest, first = "/".join(names[:3]), "/".join(names[3:]), 0
    names = rest.split("/")
    while first < len(names) - 1:
        longer = f"{root.rstrip('/')}/{names[first]}"
        if WILDCARDS.search(names[first]) and not objects.is_folder(longer):
            break
        root, first = longer, first + 1
    return root, "/".join(names[first:])


def _manifest(settings: ReadingSettings) -> Iterator[StoredObject]:
    """The files that the manifest names, one a line, relative to its own folder. Missing ones too."""
    assert settings.manifest is not None
    manifest = objects.absolute(settings.manifest)
    try:
        text = storage.read(manifest).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"--manifest {settings.manifest}: expected UTF-8, got {error}"
        ) from None
    except OSError as error:
        raise SettingsError(f"--manifest {settings.manifest}: cannot be read: {error}") from None
    folder = manifest.rpartition("/")[0]
    empty = True
    for line in text.split("\n"):
        name = line.removesuffix("\r")
        if not name.strip():
            continue
        empty = False
        relative = storage.is_local(name) and not name.startswith("/")
        yield objects.look(objects.absolute(f"{folder}/{name}" if relative else name))
    if empty and not settings.allow_empty:
        raise SettingsError(
            f"--manifest {settings.manifest}: expected a path on each line, found none; or give --allow-empty"
        )


def _units(listed: StoredObject, settings: ReadingSettings) -> list[WorkUnit]:
    kind, compression = by_name(listed.uri, settings.format)
    bounds: Sequence[tuple[int, int | None]] = [(0, None)]
    divisible = kind in ("jsonl", "parquet") and compression == "none" and listed.generation
    if divisible and listed.size_bytes > settings.split_bytes:
        with suppress(ObjectError, OSError):  # else it is one unit, and reading says what is wrong
            bounds = _bounds(listed, kind, settings)
    return [
        WorkUnit(
            uri=listed.uri,
            format=kind,
            compression=compression,
            start=start,
            stop=stop,
            size_bytes=listed.size_bytes,
            generation=listed.generation,
        )
        for start, stop in bounds
    ]


def _bounds(
    listed: StoredObject, kind: str, settings: ReadingSettings
) -> Sequence[tuple[int, int | None]]:
    """The parts in which a large object is read; one if its content turns out to be compressed."""
    size = listed.size_bytes
    with OpenObject(listed.uri, size_bytes=size, generation=listed.generation) as source:
        head = source.file.read(HEAD_BYTES)
        if compression_by_content(head, "none") != "none":
            return [(0, None)]
        if kind == "parquet":
            source.file.seek(0)
            with parquet.opened(source.file) as opened:
                return _row_groups(opened.metadata, settings.split_bytes)
    encoding, _ = detect(head, settings.encoding)
    if len(newline_of(encoding)) > 1:
        return [(0, None)]
    count = -(-size // settings.split_bytes)
    starts = [size * number // count for number in range(count)]
    stops = [*starts[1:], None]  # the last part has no end: nothing may be left unread
    return list(zip(starts, stops, strict=True))


def _row_groups(metadata: pq.FileMetaData, split_bytes: int) -> list[tuple[int, int | None]]:
    """Runs of row groups that take about `split_bytes` of the file each."""
    sizes = [
        sum(group.column(column).total_compressed_size for column in range(group.num_columns))
        for group in map(metadata.row_group, range(metadata.num_row_groups))
    ]
    bounds: list[tuple[int, int | None]] = []
    begin = taken = 0
    for number, size in enumerate(sizes):
        if number > begin and taken + size > split_bytes:
            bounds.append((begin, number))
            begin, taken = number, 0
        taken += size
    bounds.append((begin, len(sizes)))
    return bounds if len(bounds) > 1 else [(0, None)]


def field_types(settings: ReadingSettings, listing: Listing) -> tuple[pa.Field, ...]:
    """The kept fields with their types: as given, else as in the first Parquet file, else string.

    Raises:
      SettingsError: see decoding.fields.kept_fields.
    """
    kept = kept_fields(settings)
    schema = None
    if any(kind is None for _, kind in kept):
        schema = _first_parquet_schema(listing)
    fields = []
    for name, kind in kept:
        if kind is None and schema is not None and schema.names.count(name) == 1:
            kind = column_type(schema.field(name).type)
            if pa.types.is_null(kind):  # as pandas writes a column without values: it says nothing
                kind = pa.string()
        fields.append(pa.field(name, kind if kind is not None else pa.string()))
    return tuple(fields)


def _first_parquet_schema(listing: Listing) -> pa.Schema | None:
    for unit in listing.units:
        if unit.format != "parquet":
            continue
        try:
            with OpenObject(
                unit.uri, size_bytes=unit.size_bytes, generation=unit.generation
            ) as source:
                compression = compression_by_content(source.file.read(HEAD_BYTES), unit.compression)
                source.file.seek(0)
                with parquet.opened(source.file, compression) as opened:
                    return opened.schema_arrow
        except (ObjectError, OSError):
            continue  # reading it says what is wrong
    return None


def write_listing(units: Iterable[WorkUnit], path: str) -> None:
    """Writes work units to a Parquet file, `done` positions included."""
    with (
        storage.create(path) as file,
        pq.ParquetWriter(file, _LISTING_SCHEMA, compression="zstd") as writer,
    ):
        group: list[WorkUnit] = []
        positions = 0
        for unit in units:
            group.append(unit)
            positions += len(unit.done)
            if len(group) >= _UNITS_PER_GROUP or positions >= _POSITIONS_PER_GROUP:
                writer.write_table(_listing_table(group))
                group, positions = [], 0
        if group:
            writer.write_table(_listing_table(group))


def _listing_table(units: Sequence[WorkUnit]) -> pa.Table:
    columns = {
        name: [getattr(unit, name) for unit in units]
        for name in _LISTING_SCHEMA.names
        if name != "done"
    }
    done = [np.asarray(unit.done, np.int64) for unit in units]
    return pa.table(columns | {"done": done}, schema=_LISTING_SCHEMA)


def read_listing(path: str) -> Iterator[WorkUnit]:
    """The work units of a file that `write_listing` wrote, in their order."""
    with storage.open_input(path) as file:
        parquet_file = pq.ParquetFile(file)
        for group in range(parquet_file.num_row_groups):
            table = parquet_file.read_row_group(group)
            others = table.drop_columns("done").to_pylist()
            for row, done in zip(others, table["done"], strict=True):
                positions = array("q", done.values.to_numpy().tobytes())
                yield WorkUnit(**row, done=positions or ())
