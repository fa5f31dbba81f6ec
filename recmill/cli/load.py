"""`recmill load`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from recmill.cli.arguments import add_command, add_output_options, silent
from recmill.cli.flags import UsageError, add_trust_code, typed
from recmill.config import COUNT


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "load",
        _load,
        "fill a feature store: rows of a bundle, or of a Parquet file, into Redis",
        """
recmill load --bundle runs/shop/bundle --features redis://localhost:6379
recmill load --bundle runs/shop/bundle --features redis://localhost:6379 --resume
recmill load --bundle b --features redis+cluster://a:6379,b:6379 --rate 5000 --ttl 604800
recmill load --bundle b --features redis://localhost --side item --parquet new-items.parquet
""",
    )
    parser.add_argument(
        "--bundle", required=True, metavar="DIR", help="the bundle whose rows or Plan to take"
    )
    parser.add_argument(
        "--features",
        required=True,
        metavar="URL",
        help="the store: redis://, rediss://, redis+sentinel:// or redis+cluster://",
    )
    parser.add_argument(
        "--side", choices=["user", "item", "both"], default="both", help="whose rows (default: both)"
    )
    parser.add_argument(
        "--parquet", metavar="FILE", help="raw columns of one side to load instead of the bundle's own rows"
    )
    parser.add_argument(
        "--rate", type=typed(COUNT), metavar="ROWS", help="rows per second at most (default: no bound)"
    )
    parser.add_argument(
        "--ttl", type=typed(COUNT), metavar="SECONDS", help="rows vanish after this time (default: they stay)"
    )
    parser.add_argument(
        "--prefix", default="recmill", metavar="TEXT", help="what keys begin with (default: recmill)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="leave out what an interrupted load of the same rows has written",
    )
    add_trust_code(parser)
    add_output_options(parser)


def _load(parsed: argparse.Namespace) -> None:
    from pathlib import Path

    if parsed.parquet and parsed.side == "both":
        raise UsageError("--parquet holds rows of one side; say which: --side user or --side item.")
    from recmill.artifacts.bundle.bundle import Bundle
    from recmill.artifacts.feature_store.load import load, sides_to_load
    from recmill.artifacts.feature_store.redis import RedisStore
    from recmill.reporting.progress import Progress

    bundle = Bundle.open(parsed.bundle, parsed.trust_code)
    store = RedisStore(parsed.features, bundle, parsed.prefix, timeout_seconds=10.0, ttl_seconds=parsed.ttl)
    try:
        loaded = load(
            store,
            bundle,
            sides_to_load(bundle, parsed.side),
            Path(parsed.parquet) if parsed.parquet else None,
            parsed.rate,
            parsed.resume,
            Progress(parsed.quiet),
        )
    finally:
        store.close()
    say = silent if parsed.json else print
    say(f"read   {bundle.path}   version {bundle.version}")
    for one in loaded:
        skipped = f"   {one.num_skipped:,} were there" if one.num_skipped else ""
        rate = one.num_rows / max(1e-9, one.seconds)
        say(f"loaded {one.num_rows:,} {one.side}s in {one.seconds:.1f} s   {rate:,.0f} rows/s{skipped}")
    say(f"wrote  {store.servers.address}   keys {parsed.prefix}:*")
    say(f"next   recmill serve --bundle {parsed.bundle} --features {store.servers.address}")
    if parsed.json:
        print(
            json.dumps(
                {
                    "store": str(store.servers.address),
                    "prefix": parsed.prefix,
                    "version": bundle.version,
                    "sides": [
                        {
                            "side": one.side,
                            "rows": one.num_rows,
                            "skipped": one.num_skipped,
                            "seconds": one.seconds,
                        }
                        for one in loaded
                    ],
                }
            )
        )
