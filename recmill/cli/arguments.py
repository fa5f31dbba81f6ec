"""What commands share: their arguments, and how they show sizes and counts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from recmill.errors import RecmillError

if TYPE_CHECKING:
    from recmill.recipe.recipe import Recipe
    from recmill.stages.prepare.prepare import PrepareConfig


class UsageError(RecmillError):
    """Flags that do not go together."""

    exit_code = 2


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int | None], help: str, examples: str
) -> Any:
    parser = commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.strip().splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=run, command_name=name)
    return parser


def add_recipe(parser: Any) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a shipped recipe's name, a TOML file, or file.py:function"
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override a value of the recipe; without VALUE, its default holds",
    )


def add_trust_code(parser: Any) -> None:
    parser.add_argument(
        "--trust-code",
        type=module_names,
        default=(),
        metavar="MODULE,...",
        help="modules or packages of functions that the bundle's features may call (default: none)",
    )


def module_names(text: str) -> tuple[str, ...]:
    """Names of modules or packages, separated by commas."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise argparse.ArgumentTypeError(f"must be modules such as shop.features, got {text}")
    return names


def add_engine_options(parser: Any) -> None:
    """Where rows are worked on, and how much of it."""
    parser.add_argument(
        "--engine",
        choices=["local", "ray", "spark"],
        default="local",
        help="where to run (default: local, threads of this process)",
    )
    parser.add_argument(
        "--address",
        metavar="URL",
        help="of a cluster: Ray's auto or HOST:PORT; Spark's spark://HOST:PORT, yarn, k8s://URL, local[2] or "
        "sc://HOST:PORT for Spark Connect (default: a cluster that is started on this machine)",
    )
    add_spark_conf(parser)
    parser.add_argument(
        "--memory",
        type=size,
        default="2GB",
        metavar="SIZE",
        help="memory bound, such as 1GB, of this process and of each task of a cluster (default: 2GB)",
    )
    parser.add_argument(
        "--workers",
        type=positive,
        metavar="N",
        help="threads, or tasks of a cluster at once (default: the cores that this process or the cluster has)",
    )


def engine_settings(parsed: argparse.Namespace) -> dict[str, Any]:
    """What the flags set of an `EngineConfig`."""
    names = ("engine", "address", "workers", "memory")
    return {**{name: getattr(parsed, name) for name in names}, "conf": dict(parsed.spark_conf)}


def add_spark_conf(parser: Any) -> None:
    parser.add_argument(
        "--spark-conf",
        type=spark_setting,
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a setting of Spark's own, such as spark.executor.memory=4g; may be given again",
    )


def add_max_bad(parser: Any) -> None:
    parser.add_argument(
        "--max-bad",
        type=share,
        default="0.1%",
        metavar="SHARE",
        help="share of bad rows that is an error (default: 0.1%%)",
    )


def add_output_options(parser: Any) -> None:
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_prepare_options(parser: Any) -> None:
    add_engine_options(parser)
    add_max_bad(parser)
    add_output_options(parser)


def load(parsed: argparse.Namespace) -> Recipe:
    from recmill.recipe.load import load_recipe

    return load_recipe(parsed.recipe, parsed.overrides)


def prepare_options(parsed: argparse.Namespace) -> PrepareConfig:
    from recmill.stages.prepare.prepare import PrepareConfig

    return PrepareConfig(
        **engine_settings(parsed),
        max_bad=parsed.max_bad,
        partitions=getattr(parsed, "partitions", None),
        binary=getattr(parsed, "binary", False),
    )


def silent(line: str) -> None:
    """Say nothing."""


def counted(number: int, one: str) -> str:
    return f"{number} {one}" if number == 1 else f"{number} {one}s"


def seed(text: str) -> int:
    if not re.fullmatch(r"\d{1,19}", text, re.ASCII) or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2**63 - 1, got {text}")
    return int(text)


def positive(text: str) -> int:
    if not re.fullmatch(r"[0-9][0-9_]{0,18}", text) or text.endswith("_") or int(text.replace("_", "")) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text}")
    return int(text.replace("_", ""))


def spark_setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, such as spark.executor.memory=4g, got {text}")
    return key, value


_UNITS = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}


def size(text: str) -> int:
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]?B?)", text.strip().upper(), re.ASCII)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"must be a size such as 500MB or 2GB, got {text}")
    unit = match[2] if match[2].endswith("B") or not match[2] else match[2] + "B"
    return int(float(match[1]) * _UNITS[unit])


def share(text: str) -> float:
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"must be a share such as 0.001 or 0.1%, got {text}")
    return share


def seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found < 1e9:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text}")
    return found


def show_bytes(number: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1024:
            return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TB"
