"""`recmill serve`."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import add_command, add_folder
from recmill.cli.flags import UsageError, add_flags, read_config
from recmill.stages.serve.config import ServeConfig

if TYPE_CHECKING:
    from recmill.stages.serve.server import Ready


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "serve",
        _serve,
        "answer over HTTP and gRPC from a bundle",
        """
recmill serve runs/shop
recmill serve --bundle runs/shop/bundle --http-port 0 --grpc-port 0 --json
recmill serve --bundle runs/shop/bundle --host 0.0.0.0 --tls-cert c.pem --tls-key k.pem --token-file tokens
recmill serve --bundle runs/shop/bundle --features redis://localhost:6379 --processes 4
recmill serve --bundle runs/shop/bundle --events redis://localhost:6379/shop:events
recmill serve --bundle s3://models/shop/bundle     new versions and deltas are copied as they are published
recmill serve --bundle runs/shop/bundle --role rank --http-port 8090 --grpc-port 8091
""",
    )
    parser.add_argument("run", nargs="?", metavar="RUN_DIR", help="what `recmill run` or `start` wrote")
    add_folder(parser, "--bundle", "what `recmill export` wrote, also a URL, instead of RUN_DIR")
    parser.add_argument("--json", action="store_true", help="print its addresses as one JSON object")
    add_flags(parser, ServeConfig)


def _serve(parsed: argparse.Namespace) -> int:
    # Each request runs on one thread: the thread pools of libraries would only compete. They read these when they are
    # first imported, which is now.
    for pool in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "POLARS_MAX_THREADS"):
        os.environ.setdefault(pool, "1")
    # With the listener of gRPC's event engine a call costs 70 us more CPU. A version without it logs so and
    # continues.
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener,-event_engine_client")
    is_remote = parsed.bundle is not None and "://" in parsed.bundle
    bundle = _copy_of(parsed) if is_remote else bundle_of(parsed.run, parsed.bundle)
    config = read_config(parsed, ServeConfig, bundle=bundle, bundle_url=parsed.bundle if is_remote else None)
    _check(config)
    from recmill.stages.serve.server import run

    return run(config, lambda ready: _say(ready, parsed.json))


def _copy_of(parsed: argparse.Namespace) -> Path:
    """The local copy of a URL's bundles, with the current version."""
    if parsed.run is not None:
        raise UsageError("Give the folder of a run or --bundle, one of them: recmill serve runs/shop")
    from recmill.stages.serve.storage import first_copy

    return first_copy(parsed.bundle)


def bundle_of(run: str | None, bundle: str | None) -> Path:
    """The bundle that is named, or the one in a run's folder."""
    if (run is None) == (bundle is None):
        raise UsageError("Give the folder of a run or --bundle, one of them: recmill serve runs/shop")
    if run is None:
        return Path(str(bundle))
    found = Path(run) / "bundle"
    if not found.is_dir():
        raise UsageError(
            f"{run} has no folder `bundle`. Expected what `recmill run --into {run}` leaves there; a bundle of another "
            "name goes behind --bundle."
        )
    return found


def _check(config: ServeConfig) -> None:
    addresses = {"recall": config.recall_at, "features": config.features_at, "rank": config.rank_at}
    missing = [f"--{stage}-at" for stage, given in addresses.items() if not given]
    if config.role == "recommend" and missing:
        raise UsageError(f"--role recommend calls other processes: add {', '.join(missing)}.")
    if config.role != "recommend" and len(missing) < len(addresses):
        raise UsageError("--recall-at, --features-at and --rank-at go with --role recommend.")
    if config.events and config.features:
        raise UsageError(
            "--events and --features do not go together: with a stream, every server has the newest events of users in "
            "memory. Remove one of them."
        )
    if config.prefix and not config.features:
        raise UsageError("--prefix goes with --features.")
    if bool(config.tls_cert) != bool(config.tls_key):
        raise UsageError("--tls-cert and --tls-key go together.")
    if config.tls_client_ca and not config.tls_cert:
        raise UsageError("--tls-client-ca needs --tls-cert and --tls-key.")


def _say(ready: Ready, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(ready)), flush=True)
    else:
        more = "" if ready.processes == 1 else f"   {ready.processes} processes"
        print(f"ready  {ready.http}   grpc {ready.grpc}   bundle {ready.version}{more}", flush=True)
