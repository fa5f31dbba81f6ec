"""Files of checkpoints: digests, and folders that are created and removed atomically."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path

from recmill.errors import ArtifactError

STEP_NAME = re.compile(r"step-(\d{8,})")


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def digest_of(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise ArtifactError(f"Checkpoint {path.parent} is damaged: {path.name} is missing.") from None


def remove_folder(path: Path) -> None:
    """Remove a folder: it is renamed first, so that an interrupted removal leaves no damaged checkpoint."""
    if path.exists():
        aside = path if path.name.endswith(".partial") else path.with_name(path.name + ".gone.partial")
        if aside != path:
            os.rename(path, aside)
        shutil.rmtree(aside)


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
