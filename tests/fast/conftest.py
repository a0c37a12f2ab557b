"""A file system that fills up."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class SmallDisk:
    """A file system of its own, of a few pages."""

    folder: Path

    def fill(self, leaving: int = 0) -> None:
        """Take all space but `leaving` pages."""
        page = os.statvfs(self.folder).f_frsize
        with open(self.folder / "filler", "ab", buffering=0) as filler:
            filler.write(bytes(max(0, os.statvfs(self.folder).f_bavail - leaving) * page))

    def remount(self, how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", self.folder], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True)
    if done.returncode:
        pytest.skip("only root may mount a file system")
    yield SmallDisk(folder)
    subprocess.run(["umount", "--lazy", folder], check=True)
