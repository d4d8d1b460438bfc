"""Listed files: what is there, which content it has, and that content's bytes as long as it is the same.

Local paths go past Beam for listing: its local filesystem hides files that cannot be looked at, reads names
as patterns, and gives times in seconds as floats. All else goes through Beam's FileSystems.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO
from urllib.parse import quote, unquote_to_bytes

from apache_beam.io.filesystem import BeamIOError
from apache_beam.io.filesystems import FileSystems

from pipeline.storage import exists, is_local, open_input

# Nothing is there, and nothing will be: a link that leads to itself, a name longer than any file's.
_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
_FILE_URL = "file://"


class ObjectError(ValueError):
    """An object, or the rest of it from `position` on, cannot be read. `reason` is a Failure's."""

    def __init__(self, reason: str, message: str, position: int = -1) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.position = position


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredObject:
    """A file as listed. `generation` identifies its content; "" where there is none to be had."""

    uri: str
    size_bytes: int
    generation: str


def absolute(path: str) -> str:
    """The path as it is listed. Local ones, file:/// URLs too, are made absolute; a trailing slash is dropped."""
    path = _path(path)
    return os.path.abspath(path) if is_local(path) else path.rstrip("/")


def _uri(path: str) -> str:
    """A uri of this file alone, which can be stored: the path, or a file:/// URL if it holds bytes that are not UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return _FILE_URL + quote(os.fsencode(path))
    return path


def _path(uri: str) -> str:
    """The path that a local file's uri stands for; other uris as they are."""
    if not uri.startswith(f"{_FILE_URL}/"):
        return uri
    return os.fsdecode(unquote_to_bytes(uri.removeprefix(_FILE_URL)))


def look(path: str) -> StoredObject:
    """The object at a path (see `absolute`). One that is missing, or is no file, has generation "": reading it says what is wrong."""
    try:
        if is_local(path):
            found = os.stat(path)
            if stat.S_ISREG(found.st_mode):
                return StoredObject(
                    uri=_uri(path), size_bytes=found.st_size, generation=str(found.st_mtime_ns)
                )
        else:
            return _remote(FileSystems.get_filesystem(path).metadata(path))
    except (OSError, ValueError):  # ValueError: a NUL in the name
        with suppress(PermissionError):
            if not is_local(path) and exists(path):
                raise  # it is there: this is the service's trouble
    return StoredObject(uri=_uri(path), size_bytes=0, generation="")


def is_file(uri: str) -> bool:
    """Whether something other than a folder is there; locally also a link that leads nowhere."""
    if is_local(uri):
        return os.path.lexists(uri) and not os.path.isdir(uri)
    return uri.count("/") > 2 and exists(uri)  # a bucket is no file


def is_folder(uri: str) -> bool:
    """Whether this is a local folder, or the beginning of object names elsewhere."""
    if is_local(uri):
        return os.path.isdir(uri)
    return next(iter(_remote_below(uri)), None) is not None


def below(folder: str, depth: int | None = None) -> Iterator[tuple[str, StoredObject]]:
    """Every file below a folder, with its path relative to it; at most `depth` names long.

    Links are followed; each folder is listed once, under the name that comes first.

    Raises:
      OSError: a folder cannot be listed.
    """
    if is_local(folder):
        if os.path.isdir(folder):
            yield from _local_below(folder, "", depth, set())
        return
    for metadata in _remote_below(folder):
        path = metadata.path[len(folder) + 1 :]
        if path and not path.endswith("/") and (depth is None or path.count("/") < depth):
            yield path, _remote(metadata)


def _local_below(
    folder: str, prefix: str, depth: int | None, seen: set[tuple[int, int]]
) -> Iterator[tuple[str, StoredObject]]:
    found = os.stat(folder)
    here = (found.st_dev, found.st_ino)
    if here in seen:  # under another name; links may multiply names without end
        return
    seen.add(here)
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        path = f"{prefix}{entry.name}"
        if not _is_folder(entry):
            yield path, look(entry.path)
        elif depth is None or path.count("/") + 1 < depth:
            yield from _local_below(entry.path, f"{path}/", depth, seen)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, say
        return False


def _remote_below(folder: str) -> list[Any]:
    # A wildcard's letter in the folder's own name would be read as one: list from before it, then compare.
    literal = re.match(r"[^*?\[]*", f"{folder}/")
    assert literal is not None
    try:
        [match] = FileSystems.match([f"{literal.group()}**"])
    except BeamIOError as error:
        raise OSError(f"cannot list {folder}: {error}") from error
    return [entry for entry in match.metadata_list if entry.path.startswith(f"{folder}/")]


def _remote(metadata: Any) -> StoredObject:
    return StoredObject(
        uri=metadata.path,
        size_bytes=metadata.size_in_bytes,
        generation=repr(metadata.last_updated_in_seconds),
    )


_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


class OpenObject:
    """The bytes of an object that still has its listed content; a context manager.

    `check()` after reading says whether what was read is from that content: call it before giving it on.

    Raises:
      ObjectError: missing_object, not_a_file, unreadable_object or changed_object.
    """

    def __init__(self, uri: str, *, size_bytes: int, generation: str) -> None:
        self.uri = uri
        self._size_bytes = size_bytes
        self._generation = generation
        self._path = _path(uri)
        self._local = is_local(self._path)
        self.file: BinaryIO

    def __enter__(self) -> OpenObject:
        try:
            self.file = self._open()
        except OSError as error:
            if error.errno in _MISSING:
                raise ObjectError(
                    "missing_object", f"expected a file, found nothing at {self.uri}"
                ) from None
            if isinstance(error, PermissionError):
                raise ObjectError(
                    "unreadable_object", f"cannot open {self.uri}: {error.strerror}"
                ) from None
            raise
        try:
            self.check()
        except BaseException:
            self.file.close()
            raise
        return self

    def _open(self) -> BinaryIO:
        if not self._local:
            if not exists(self.uri):  # opening it, each filesystem has an error of its own
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return open_input(self.uri)
        try:
            mode = os.stat(self._path).st_mode
        except ValueError:  # a NUL in the name
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from None
        if not stat.S_ISREG(mode):  # opening a pipe would wait for ever
            kind = _KINDS.get(stat.S_IFMT(mode), "a device")
            raise ObjectError("not_a_file", f"expected a file, got {kind}: {self.uri}")
        return open_input(self._path)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.file.close()

    def check(self, *, last: bool = True) -> None:
        """Raises ObjectError(changed_object) if the content is no longer the listed one.

        Locally this looks at the open file, so it is cheap and also sees a file that is written in place; one that
        was replaced by another keeps its old content for as long as it is open. Elsewhere it asks the service,
        and only if this is the `last` check.
        """
        if not (self._local or last):
            return
        if self._local:
            found = os.fstat(self.file.fileno())
            size_bytes, generation = found.st_size, str(found.st_mtime_ns)
        else:
            now = look(self.uri)
            size_bytes, generation = now.size_bytes, now.generation
        if (size_bytes, generation) != (self._size_bytes, self._generation):
            raise ObjectError(
                "changed_object",
                f"{self.uri} was changed after it was listed ({self._size_bytes} bytes then, {size_bytes} now); "
                "run again to read its new content",
            )
