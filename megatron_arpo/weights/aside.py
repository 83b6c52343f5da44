"""Folders that are there whole or not at all: written aside, on the disk, and renamed last."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_aside(target: Path, num_bytes: int, *, replace: bool = False) -> Iterator[Path]:
    """A new folder to fill, which is `target` at the end of the block, and with `replace` takes the place of what is there; a
    failure or an interruption leaves nothing, and what a kill leaves is replaced by the next try. Raises ValueError where the
    disk has no room for `num_bytes`, or turns out to be full, or something else has come to be at `target`."""
    target = Path(os.path.abspath(target))
    aside = target.with_name(f".{target.name}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if aside.exists():
            os.close(_locked(aside, target))
            shutil.rmtree(aside)
        _check_room(target, num_bytes)
        aside.mkdir()
        lock = _locked(aside, target)
    except OSError as error:
        raise ValueError(f"{target}: cannot make the folder ({error.strerror}); choose another") from error
    try:
        yield aside
        sync_folder(aside)
        _put(aside, target, replace)
        sync(target.parent)
    except OSError as error:
        free = shutil.disk_usage(target.parent).free
        shutil.rmtree(aside, ignore_errors=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(
                f"{target}: the disk is full ({free >> 20} MiB free, {-(-num_bytes >> 20)} MiB needed), nothing was left there; "
                f"free space or choose another disk"
            ) from error
        raise
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _put(aside: Path, target: Path, replace: bool) -> None:
    old = target.with_name(f".{target.name}.old")
    if replace:
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
    elif os.path.lexists(target):
        raise ValueError(f"{target}: something came to be there in the meantime; choose another folder")
    try:
        aside.rename(target)
    except BaseException:
        if replace and old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _locked(aside: Path, target: Path) -> int:
    """A descriptor that holds the folder until it is closed, by the end of the process at the latest."""
    descriptor = os.open(aside, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ValueError(f"{target}: another process is writing it; wait for that or choose another folder") from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):  # a disk without locks: nobody is kept out there
            os.close(descriptor)
            raise
    return descriptor


def _check_room(target: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes:
        raise ValueError(
            f"{target}: the disk has {free >> 20} MiB free and {-(-num_bytes >> 20)} MiB are needed; free space or choose another disk"
        )


def sync_folder(folder: Path) -> None:
    """What is in the folder is on the disk."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    """The file, or the folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
