"""Writes *_pb2.py and *_pb2.pyi beside the .proto files. Needs grpcio-tools."""

from __future__ import annotations

import sys
import tempfile
from importlib.resources import as_file, files
from pathlib import Path

HERE = Path(__file__).parent
PROTOS = ("recmill.proto", "predict_v2.proto", "tensorflow_serving.proto")
_NOT_OURS = "# ruff: noqa\n# mypy: ignore-errors\n"


def generated(proto: str) -> dict[str, str]:
    """Name -> text of the modules for one .proto file."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder, as_file(files("grpc_tools") / "_proto") as known:
        outputs = [f"--python_out={folder}", f"--pyi_out={folder}"]
        code = protoc.main(["protoc", f"-I{HERE}", f"-I{known}", *outputs, str(HERE / proto)])
        if code:
            raise SystemExit(code)
        texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(Path(folder).iterdir())}
    change = str if proto == "recmill.proto" else _with_own_pool
    return {name: _NOT_OURS + change(text) for name, text in texts.items()}


def _with_own_pool(text: str) -> str:
    return text.replace("_descriptor_pool.Default()", "INFERENCE_POOL").replace(
        "from google.protobuf import descriptor_pool as _descriptor_pool",
        "from recmill.stages.serve.proto import INFERENCE_POOL",
    )


def main() -> int:
    for proto in PROTOS:
        for name, text in generated(proto).items():
            (HERE / name).write_text(text, encoding="utf-8")
            print(f"wrote  {HERE / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
