"""Other systems to compare with. They are in the benchmarks/ folder of a checkout, not in the installed package."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import recmill
from recmill.errors import RecmillError
from recmill.stages.bench.contest import CommandFailed, Result, run_command

_CHECKOUT = Path(recmill.__file__).parent.parent
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '[\w.]+'")


@dataclass(frozen=True)
class Peer:
    """A module of benchmarks/peers that prints its result as JSON; `python` may be another environment's."""

    name: str
    bench: str
    install: str
    reads: str = ""
    tables: str = ""
    wide: str = ""
    python: str = sys.executable
    checkout: Path = _CHECKOUT

    def run(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Result:
        """Its result, or `absent` with the reason why it could not run."""
        command = [self.python, "-m", f"benchmarks.peers.{self.name}", *arguments]
        try:
            return run_command(command, {**(environment or {}), "PYTHONPATH": str(self.checkout)})
        except OSError as error:
            raise RecmillError(
                f"--peer-python {self.name}={self.python} cannot be run: {error.strerror}."
            ) from None
        except CommandFailed as error:
            is_missing = _MISSING_MODULE.match(error.reason)
            return {"absent": f"not installed: {self.install}" if is_missing else f"failed: {error.reason}"}


def find_peers(
    bench: str,
    names: Sequence[str],
    pythons: Mapping[str, str] | None = None,
    checkout: Path = _CHECKOUT,
) -> list[Peer]:
    """The peers of a bench by name, or "all"; `pythons` gives the interpreters of those that have one."""
    pythons = pythons or {}
    if not names and not pythons:
        return []
    file = checkout / "benchmarks" / "peers" / "peers.toml"
    if not file.is_file():
        raise RecmillError(
            f"--peer needs the folder benchmarks/ of a checkout, but {checkout} has none: the installed package does "
            "not contain other systems. Clone the repository, `pip install --editable .`, and run this again."
        )
    entries = tomllib.loads(file.read_text(encoding="utf-8"))
    known = {name: entry for name, entry in entries.items() if entry["bench"] == bench}
    for name in (*names, *pythons):
        if name not in (*known, "all"):
            raise RecmillError(f'bench {bench} has no peer "{name}"; peers: {", ".join(known)}, or all.')
    chosen = known if "all" in names else [name for name in known if name in (*names, *pythons)]
    return [
        Peer(name, **known[name], python=pythons.get(name, sys.executable), checkout=checkout)
        for name in chosen
    ]
