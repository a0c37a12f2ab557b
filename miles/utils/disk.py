"""Writing on disks that may be full or read-only: a file or a line is whole or absent, and errors say what to do."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from miles.errors import MilesError

_FIXES = {
    errno.ENOSPC: "free space there, or choose a folder on another file system",
    errno.EDQUOT: "this user's quota is used up: free space there, or choose a folder on another file system",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
    errno.EROFS: "choose a folder on a file system that is not read-only",
    errno.EACCES: "choose a folder that this user may write to, or change its permissions",
    errno.EPERM: "choose a folder that this user may write to, or change its permissions",
}


def free_space(path: str | Path) -> str:
    """What is left on the file system of `path`, in words; of the nearest folder that exists."""
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        stat = os.statvfs(folder)
    except OSError as e:
        return f"unknown space free on the file system of {folder} ({e.strerror})"
    text = f"{stat.f_bavail * stat.f_frsize / 2**20:.1f} MiB free on the file system of {folder}"
    return text + ", but no inode for another file" if stat.f_files and not stat.f_favail else text


def fix_of(error: OSError) -> str:
    """What to do about a failed write."""
    return _FIXES.get(error.errno or 0, "see that the folder is there and can be written")


def write_failure(path: str | Path, error: OSError) -> MilesError:
    """The error of a run that cannot write `path`: which file, why, how much space is free, the way out."""
    return MilesError(
        f"cannot write {path}: {error.strerror or error}; {free_space(path)}\n    fix: {fix_of(error)}; "
        "then go on from the last complete checkpoint with --load"
    )


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write `content` beside `path` and rename it, making its folder; the file is complete, or what was there stays.

    Raises MilesError when it cannot be written.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace"))
        draft.replace(path)
    except OSError as e:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise write_failure(path, e) from e


def append_whole(fd: int, data: bytes) -> None:
    """Append `data` to a file opened with O_APPEND: all of it, or nothing and OSError."""
    size_before = os.fstat(fd).st_size
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(fd, left) :]  # a disk that fills up takes a part first and refuses the rest
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size_before)
        raise


def drop_cut_line(fd: int, block: int = 1 << 16) -> None:
    """Cut off what follows the last newline of a file: half a line of a process that was killed while it wrote."""
    size = end = os.fstat(fd).st_size
    while end:
        start = max(0, end - block)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)
