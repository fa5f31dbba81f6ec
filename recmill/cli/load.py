"""`recmill load`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from recmill.artifacts.feature_store.config import LoadConfig
from recmill.cli.arguments import add_command, add_output_options, silent
from recmill.cli.flags import UsageError, add_flags, add_trust_code, read_config


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
    add_flags(parser, LoadConfig)
    add_trust_code(parser)
    add_output_options(parser)


def _load(parsed: argparse.Namespace) -> None:
    config = read_config(parsed, LoadConfig)
    if config.parquet and config.side == "both":
        raise UsageError("--parquet holds rows of one side; say which: --side user or --side item.")
    from recmill.artifacts.bundle.bundle import Bundle
    from recmill.artifacts.feature_store.load import load_at
    from recmill.reporting.progress import Progress

    bundle = Bundle.open(parsed.bundle, parsed.trust_code)
    address, loaded = load_at(parsed.features, bundle, config, Progress(parsed.quiet))
    say = silent if parsed.json else print
    say(f"read   {bundle.path}   version {bundle.version}")
    for one in loaded:
        skipped = f"   {one.num_skipped:,} were there" if one.num_skipped else ""
        rate = one.num_rows / max(1e-9, one.seconds)
        say(f"loaded {one.num_rows:,} {one.side}s in {one.seconds:.1f} s   {rate:,.0f} rows/s{skipped}")
    say(f"wrote  {address}   keys {config.prefix}:*")
    say(f"next   recmill serve --bundle {parsed.bundle} --features {address}")
    if parsed.json:
        print(
            json.dumps(
                {
                    "store": address,
                    "prefix": config.prefix,
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
