"""The config of export."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from recmill.config import SECONDS, Flag, ValueKind
from recmill.engines.config import DEFAULT_MEMORY


def _parse_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port)
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"must be a URL such as http://shop-serve:8080, got {text}")
    return text


_URL = ValueKind(_parse_url, "URL")


@dataclass(frozen=True)
class ExportConfig:
    """How a bundle is made. What did not pass its gate is refused unless `despite_gate`."""

    rows: Annotated[Literal["float32", "float16", "int8"], Flag("how embedding rows are stored")] = "float32"
    products: Annotated[
        Literal["float32", "int8"],
        Flag("how the ranker multiplies on servers; int8 is calibrated and checked on rows of the log"),
    ] = "float32"
    which: Annotated[str, Flag("which checkpoint", metavar="best|last|STEP")] = "best"
    index: Annotated[
        Literal["auto", "exact", "clustered"],
        Flag("how items are found by vector (default: exact up to 200,000 items, clustered above)"),
    ] = "auto"
    despite_gate: Annotated[bool, Flag("publish also what did not pass its gate in evaluate")] = False
    publish: Annotated[bool, Flag("make the version current; without it, what is current stays so")] = True
    keep: Annotated[int | None, Flag("remove all but the newest N versions (default: keep all)")] = None
    memory: int = DEFAULT_MEMORY
    threads: int | None = None  # all cores


@dataclass(frozen=True)
class PublishConfig:
    """How an exported bundle becomes current."""

    into: Annotated[str | None, Flag("publish: where servers look for what is current", metavar="DIR")] = None
    checkpoint: Annotated[
        str | None,
        Flag("publish: what it was exported from; kept for the next gate", metavar="DIR"),
    ] = None
    keep: Annotated[int | None, Flag("publish: remove all but the newest N versions")] = None
    despite_gate: Annotated[bool, Flag("publish: also what no gate of evaluate let through")] = False


@dataclass(frozen=True)
class RolloutConfig:
    """Whom to ask for the version that they serve, and for how long."""

    server: Annotated[
        str | None, Flag("rollout: where servers answer; each address of the name is asked", _URL)
    ] = None
    timeout: Annotated[float, Flag("rollout: after which the version before is current again", SECONDS)] = (
        300.0
    )
    token_file: Annotated[
        Path | None, Flag("rollout: its first word is the token to send", ValueKind(Path, "FILE"))
    ] = None
    ca: Annotated[Path | None, Flag("rollout: trust this PEM", ValueKind(Path, "FILE"))] = None
    tls_name: Annotated[
        str | None, Flag("rollout: that certificates are for (default: that of --server)", metavar="NAME")
    ] = None
