"""JSON files of remat's objects: a kind, a version, and the fields; written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from remat.errors import InvalidFile


def write(path: str | os.PathLike[str], kind: str, version: int, fields: dict[str, Any]) -> None:
    """Writes `fields` to `path`, whole or not at all."""
    text = json.dumps({"remat": kind, "version": version, **fields}, allow_nan=False)
    write_whole(path, (text + "\n").encode())


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes `content` to `path`; an interruption leaves the old file, or none, never half of one."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp's 0600 would keep a shared file from colleagues
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(path: str | os.PathLike[str], kind: str, version: int, *, oldest: int | None = None) -> dict[str, Any]:
    """The fields that `write` stored at `path`.

    Args:
        oldest: the oldest version that can be read; None: only `version` itself.

    Raises:
        InvalidFile: not a JSON file, another kind of object, or of a version that cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidFile(f"{path}: not valid JSON ({error})") from error
    found = content.pop("remat", None) if isinstance(content, dict) else None
    if found != kind:
        raise InvalidFile(f"{path}: expected a {kind}, found {found or 'a file not written by remat'}")
    found_version = content.pop("version", None)
    if not isinstance(found_version, int) or not (oldest or version) <= found_version <= version:
        versions = f"{oldest} to {version}" if oldest and oldest < version else f"{version}"
        raise InvalidFile(
            f"{path}: {kind} of format version {found_version}; this release of remat reads version {versions}"
        )
    return content
