"""A folder for Ray that nobody else has."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def own_ray_folder() -> Iterator[None]:
    """Replace Ray's default folder, for this process and those it starts, by a new one.

    `ray.cluster_utils.Cluster` notes its address in the default folder whatever folder its nodes are given, and
    removes the note of any other cluster when it ends. It does not create the folder.
    """
    folder = tempfile.mkdtemp(prefix="ray")  # short: paths of sockets have a limit
    os.mkdir(f"{folder}/ray")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_TMPDIR", folder)
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
