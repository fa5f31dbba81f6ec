"""A gRPC server that does nothing, to measure the load generator: `python -m recmill.stages.bench.serve.echo`."""

from __future__ import annotations

import asyncio
import sys

from recmill.errors import MissingPackage

METHOD = "/echo.Echo/Echo"


async def serve(num_bytes: int) -> None:
    """Answer every call with so many bytes until the process ends; the first line printed is the port."""
    try:
        import grpc
    except ImportError:
        raise MissingPackage("bench serve", "grpcio", "serve") from None
    answer = bytes(num_bytes)

    async def echo(request: bytes, context: object) -> bytes:
        return answer

    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler(
        "echo.Echo", {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    )
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
