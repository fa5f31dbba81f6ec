"""`recmill bundle`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import add_command, add_json, counted, show_bytes, silent
from recmill.cli.export import check_lines
from recmill.cli.flags import UsageError, add_flags, is_given, read_config, refuse_flags
from recmill.stages.export.config import PublishConfig, RolloutConfig

if TYPE_CHECKING:
    from pathlib import Path

    from recmill.artifacts.bundle.bundle import Bundle

_METRICS = ("auc", "log_loss", "normalised_entropy", "recall@10", "ndcg@10", "recall@50")


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "bundle",
        _bundle,
        "show what a bundle is, verify its files, diff two of them; publish one, wait for one, and until it is served",
        """
recmill bundle show runs/quickstart/bundle
recmill bundle verify runs/quickstart/bundle
recmill bundle diff runs/quickstart/bundle/0000000600-1f2e3d4c runs/quickstart/bundle
recmill bundle publish candidate --into runs/quickstart/bundle --checkpoint c --keep 3
recmill bundle rollout runs/quickstart/bundle --server http://shop-serve:8080 --timeout 300
recmill bundle wait s3://models/shop/bundle
""",
    )
    acts = ["show", "verify", "diff", "publish", "rollout", "wait"]
    parser.add_argument("act", choices=acts, help="what to do; wait: until the first version is published")
    parser.add_argument(
        "path", metavar="DIR", help="a bundle, or what `recmill export` wrote into: the current one is taken"
    )
    parser.add_argument("other", nargs="?", metavar="DIR", help="diff: the bundle to compare with")
    for config in _CONFIG_OF.values():
        add_flags(parser, config)
    add_json(parser)


_CONFIG_OF: dict[str, type] = {"publish": PublishConfig, "rollout": RolloutConfig}
_NEEDED_BY = {"publish": "into", "rollout": "server"}


def _check_flags(parsed: argparse.Namespace) -> None:
    for act, config in _CONFIG_OF.items():
        if parsed.act != act:
            refuse_flags(parsed, config, f"is for {act}. Remove it.")
        elif not is_given(parsed, config, _NEEDED_BY[act]):
            raise UsageError(f"{act} needs --{_NEEDED_BY[act]}.")


def _bundle(parsed: argparse.Namespace) -> None:
    from recmill.artifacts.bundle.bundle import Bundle

    _check_flags(parsed)
    if (parsed.act == "diff") != (parsed.other is not None):
        takes = "compares two bundles: name both" if parsed.act == "diff" else "takes one bundle"
        raise UsageError(f"{parsed.act} {takes}.")
    if parsed.act in _ACTS:
        _ACTS[parsed.act](parsed)
        return
    bundle = Bundle.open(parsed.path)
    if parsed.act == "diff":
        _diff(parsed, bundle, Bundle.open(parsed.other))
    elif parsed.act == "verify":
        _verify(parsed, bundle)
    else:
        card = card_of(bundle)
        print(json.dumps(card) if parsed.json else "\n".join(_card_lines(card)))


def _diff(parsed: argparse.Namespace, left: Bundle, right: Bundle) -> None:
    from dataclasses import asdict

    from recmill.artifacts.bundle.compare import diff

    found = diff(left, right)
    print(json.dumps(asdict(found)) if parsed.json else "\n".join(found.lines()))


def _verify(parsed: argparse.Namespace, bundle: Bundle) -> None:
    bundle.verify()
    files = len(bundle.manifest["files"])
    if parsed.json:
        print(
            json.dumps(
                {"bundle": str(bundle.path), "verified": True, "files": files, "num_bytes": bundle.num_bytes}
            )
        )
    else:
        print(
            f"verified {bundle.path}   {counted(files, 'file')}   {show_bytes(bundle.num_bytes)}   as written"
        )


def _publish(parsed: argparse.Namespace) -> None:
    from recmill.stages.export.publish import publish_at

    config = read_config(parsed, PublishConfig)
    assert config.into is not None
    found = publish_at(parsed.path, config.into, config.checkpoint, config.keep, config.despite_gate)
    if parsed.json:
        shown = {"version": found.bundle.version, "previous": found.previous, "removed": list(found.removed)}
        print(json.dumps({"bundle": str(found.bundle.path), **shown}))
        return
    print(f"current {found.bundle.path}   before {found.previous or 'none'}")
    if found.removed:
        print(f"removed {', '.join(found.removed)}")


def _rollout(parsed: argparse.Namespace) -> None:
    from recmill.stages.export.rollout import Server, roll_out

    config = read_config(parsed, RolloutConfig)
    assert config.server is not None
    token = _first_word(config.token_file) if config.token_file else None
    server = Server(config.server, token, config.ca, config.tls_name)
    say = silent if parsed.json else lambda line: print(f"asked  {line}", flush=True)
    version = roll_out(parsed.path, server, config.timeout, say)
    print(json.dumps({"version": version, "served": True}) if parsed.json else f"served {version}")


def _wait(parsed: argparse.Namespace) -> None:
    import signal

    from recmill.stages.export.rollout import wait_for_version

    # PID 1 of a container is not ended by signals that it does not handle.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    say = silent if parsed.json else lambda line: print(f"wait   {line}", flush=True)
    version = wait_for_version(parsed.path, say)
    print(json.dumps({"version": version}) if parsed.json else f"found  {version}")


def _first_word(path: Path) -> str:
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token-file {path} cannot be read: {error}.") from None
    if not words:
        raise UsageError(f"--token-file {path} is empty; expected a token.")
    return words[0]


_ACTS = {"publish": _publish, "rollout": _rollout, "wait": _wait}


def card_of(bundle: Bundle) -> dict[str, Any]:
    """The model card: what a bundle was made from, its quality and its size."""
    manifest = bundle.manifest
    kept = ("created_at", "checkpoint", "log_end", "rows_dtype", "models", "evaluation", "gate", "check")
    return {
        "bundle": str(bundle.path),
        "version": bundle.version,
        "recipe": bundle.recipe.name,
        "description": bundle.recipe.description,
        **{name: manifest.get(name) for name in kept},
        "graphs": _sizes(bundle, "graphs/"),
        "tables": [_table(bundle, name, rows) for name in bundle.collections for rows in _rows(bundle, name)],
        "num_users": manifest["num_users"],
        "num_items": manifest["num_items"],
        "index": manifest.get("index"),
        "files": len(manifest["files"]),
        "num_bytes": bundle.num_bytes,
    }


def _rows(bundle: Bundle, collection: str) -> Iterator[Any]:
    return iter(bundle.collection(collection).rows.values())


def _table(bundle: Bundle, collection: str, rows: Any) -> dict[str, Any]:
    folder = rows.path.relative_to(bundle.path).as_posix()
    return {
        "table": f"{collection}/{rows.spec.name}",
        "rows": rows.num_rows,
        "dim": rows.dim,
        "num_bytes": sum(_sizes(bundle, f"{folder}/").values()),
    }


def _sizes(bundle: Bundle, prefix: str) -> dict[str, int]:
    files = bundle.manifest["files"]
    return {
        name.removeprefix(prefix): int(file["num_bytes"])
        for name, file in files.items()
        if name.startswith(prefix)
    }


def _card_lines(card: dict[str, Any]) -> Iterator[str]:
    import time

    yield f"version    {card['version']}   {card['recipe']}: {card['description']}"
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(card["created_at"]))
    steps = "   ".join(f"{model} step {step:,}" for model, step in card["checkpoint"]["steps"].items())
    yield f"made       {made}   of {card['checkpoint']['path']}   {steps}"
    for model, parts in card["models"].items():
        yield f"model      {model}   {_model_words(parts)}"
    for model, found in (card["evaluation"] or {}).items():
        metrics = "   ".join(
            f"{name} {found['metrics'][name]:.4f}" for name in _METRICS if name in found["metrics"]
        )
        yield f"measured   {model}   {found['split']} rows   {metrics}"
    yield f"gate       {_gate_words(card['gate'])}"
    for line in check_lines(card["check"] or {}):
        yield f"check      {line}"
    yield f"users      {card['num_users']:,}"
    index = f"   index {card['index']}" if card["index"] else ""
    yield f"items      {card['num_items']:,}{index}   log ends {card['log_end']}"
    for name, size in card["graphs"].items():
        yield f"graph      {name:<24} {show_bytes(size):>32}"
    for table in card["tables"]:
        shape = f"{table['rows']:,} x {table['dim']} {card['rows_dtype']}"
        yield f"table      {table['table']:<24} {shape:>21} {show_bytes(table['num_bytes']):>10}"
    yield f"files      {card['files']:,}   {show_bytes(card['num_bytes'])}   {card['bundle']}"


def _model_words(parts: dict[str, Any]) -> str:
    if "user" in parts:
        user, item = (counted(len(parts[side]), "feature") for side in ("user", "item"))
        return f"two towers: user {user}, item {item}, vectors of {parts['dim']}"
    numbers, keys = counted(len(parts["numbers"]), "number"), counted(len(parts["keys"]), "embedding")
    wide = f", {len(parts['wide'])} wide" if parts["wide"] else ""
    return f"{numbers}, {keys}{wide}, label {parts['label']}"


def _gate_words(gate: dict[str, Any] | None) -> str:
    if gate is None:
        return "not asked"
    verdicts = "   ".join(
        f"{verdict['model']} {verdict['condition']} {'pass' if verdict['passed'] else 'FAIL'}"
        for verdict in gate["verdicts"]
    )
    return f"{'pass' if gate['passed'] else 'FAIL'}   {verdicts}"
