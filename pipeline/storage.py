"""The few storage operations that publishing needs, on any filesystem Beam knows.

Paths are strings. Two operations go past Beam for local paths: its local `match` and `delete` read names as
patterns, so that `out[1]/part` would name another file or none (cloud.md of the design has no say in what users
call their folders).
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, cast

from apache_beam.io.filesystem import CompressionTypes
from apache_beam.io.filesystems import FileSystems

TEMPORARY = "_tmp-"  # readers of datasets leave out names that begin with an underscore


def is_local(path: str) -> bool:
    return FileSystems.get_scheme(path) is None


def join(folder: str, *names: str) -> str:
    return FileSystems.join(folder, *names)


def name_of(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def temporary(path: str) -> str:
    """A name beside `path` that no other writer uses."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/{TEMPORARY}{uuid.uuid4().hex[:12]}-{name}"


def create(path: str) -> BinaryIO:
    """Opens a file for writing, with its folder. Names never choose a compression."""
    return FileSystems.create(path, compression_type=CompressionTypes.UNCOMPRESSED)


def open_input(path: str) -> BinaryIO:
    """A file's bytes as they are stored.

    Raises:
      FileNotFoundError, PermissionError: also where the path is an object's.
    """
    with _system_errors(path):
        return FileSystems.open(path, compression_type=CompressionTypes.UNCOMPRESSED)


@contextmanager
def _system_errors(path: str) -> Iterator[None]:
    """Tells of an object what the system tells of a file: Google's errors are no OSErrors."""
    if is_local(path):
        yield
        return
    from google.api_core.exceptions import Forbidden, NotFound

    try:
        yield
    except NotFound as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
    except Forbidden as error:
        raise PermissionError(errno.EACCES, error.message, path) from error


def read(path: str) -> bytes:
    with open_input(path) as file:
        return file.read()


def write(path: str, data: bytes) -> None:
    """Writes a whole file so that a reader sees the old content or the new, never a part."""
    place = temporary(path) if is_local(path) else path  # an object appears when it is complete
    with create(place) as file:
        file.write(data)
    if place != path:
        move(place, path)


def move(source: str, target: str) -> None:
    """Renames a file, replacing what was there; atomic locally."""
    make_folder(target.rpartition("/")[0])
    FileSystems.rename([source], [target])


def copy(source: str, target: str) -> None:
    make_folder(target.rpartition("/")[0])
    FileSystems.copy([source], [target])


def make_folder(folder: str) -> None:
    if is_local(folder):
        os.makedirs(folder, exist_ok=True)


def exists(path: str) -> bool:
    """Whether a file is there.

    Raises:
      PermissionError: the service does not say.
    """
    with _system_errors(path):
        return cast(bool, FileSystems.exists(path))


def files(folder: str) -> dict[str, int]:
    """Name and size in bytes of each file directly in a folder, in order of name; empty if there is no folder."""
    if not is_local(folder):
        [match] = FileSystems.match([f"{folder}/*"])
        return {name_of(entry.path): entry.size_in_bytes for entry in match.metadata_list}
    found = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
                except FileNotFoundError:  # another process took its temporary file away
                    continue
    except FileNotFoundError:
        return {}
    return dict(sorted(found.items()))


def folders(folder: str) -> list[str]:
    """Names of the folders directly in a folder."""
    if not is_local(folder):
        [match] = FileSystems.match([f"{folder}/**"])
        inner = (entry.path[len(folder) + 1 :] for entry in match.metadata_list)
        return sorted({path.split("/", 1)[0] for path in inner if "/" in path})
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except FileNotFoundError:
        return []


def read_versioned(path: str) -> tuple[bytes, int] | None:
    """The content and the version of an object in a bucket, or None if there is none. (GCS calls it a generation.)"""
    from google.api_core.exceptions import NotFound

    blob = _blob(path)
    try:
        blob.reload()
        content: bytes = blob.download_as_bytes(if_generation_match=blob.generation)
    except NotFound:
        return None
    return content, blob.generation


def version(path: str) -> int:
    """The version of an object in a bucket; 0 if there is none, and for local files."""
    found = None if is_local(path) else read_versioned(path)
    return 0 if found is None else found[1]


def write_if(path: str, data: bytes, version: int) -> int | None:
    """Writes an object in a bucket if it still has this version (0: if there is none).

    Returns its new version, or None if another writer came first; that may have been an attempt of ours whose answer was
    lost, so see what is there.
    """
    from google.api_core.exceptions import PreconditionFailed

    blob = _blob(path)
    try:
        blob.upload_from_string(data, if_generation_match=version)
    except PreconditionFailed:
        return None
    new: int = blob.generation
    return new


def _blob(path: str) -> Any:
    # With Beam's own client, and so with its credentials.
    from apache_beam.io.gcp.gcsio import GcsIO, parse_gcs_path

    bucket, name = parse_gcs_path(path)
    return GcsIO().client.bucket(bucket).blob(name)


def delete(path: str) -> None:
    """Deletes a file; one that is not there is no error, so that a deletion can be repeated."""
    if is_local(path):
        try:
            os.remove(path)
        except FileNotFoundError:
            return
    elif exists(path):
        FileSystems.delete([path])


def delete_folder(folder: str) -> None:
    """Deletes a folder and all that is in it, if it is there."""
    if not is_local(folder):
        [match] = FileSystems.match([f"{folder}/**"])
        FileSystems.delete([entry.path for entry in match.metadata_list])
        return
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return


def delete_empty_folder(folder: str) -> None:
    """Deletes a folder if nothing is in it; object stores have none."""
    if is_local(folder):
        with suppress(OSError):
            os.rmdir(folder)


def sha256(path: str) -> str:
    with open_input(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def size(path: str) -> int:
    """Size of a file in bytes."""
    return FileSystems.get_filesystem(path).size(path)
