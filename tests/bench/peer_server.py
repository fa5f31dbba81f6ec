"""A small real server with recmill's calls over gRPC and HTTP, slow or stuck on demand: what the generator is tried on.

`python peer_server.py '{"seconds": 0.002, "stall_at": 50, "stall_seconds": 1.0, "refuse_every": 0}'` prints its ports.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import grpc

from recmill.stages.serve.proto import recmill_pb2 as pb

ITEMS = [3, 1, 4]


class Peer:
    """Answers one request after the other."""

    def __init__(
        self, seconds: float = 0.0, stall_at: int = -1, stall_seconds: float = 0.0, refuse_every: int = 0
    ):
        self.seconds, self.stall_at, self.stall_seconds = seconds, stall_at, stall_seconds
        self.refuse_every = refuse_every
        self.number = 0
        self.turn = asyncio.Lock()

    async def works(self) -> bool:
        """Whether the request is answered; it may take its time."""
        async with self.turn:
            self.number += 1
            if self.number == self.stall_at:
                await asyncio.sleep(self.stall_seconds)
            if self.seconds:
                await asyncio.sleep(self.seconds)
            return not (self.refuse_every and self.number % self.refuse_every == 0)

    async def recommend(self, request: Any, context: Any) -> Any:
        if not await self.works():
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        items = [pb.Item(id=pb.Id(number=item), score=0.5, channel="popular") for item in ITEMS[: request.k]]
        trace = pb.Trace(stage_ms={"rank": 1.5}) if request.trace else None
        answers = [
            pb.Answer(items=items, degraded=["late"], trace=trace, version="v1") for _ in request.queries
        ]
        return pb.RecommendReply(answers=answers)

    async def rank(self, request: Any, context: Any) -> Any:
        return pb.RankReply(scores=[item.number / 1e6 for item in request.items], version="v1")

    async def http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
                await reader.readexactly(length)
                items = [{"id": item, "score": 0.5, "channel": "popular"} for item in ITEMS]
                answer = {"items": items, "version": "v1"}
                body = json.dumps(answer).encode()
                status = b"200 OK" if await self.works() else b"429 Too Many Requests"
                writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


async def main(peer: Peer) -> None:
    server = grpc.aio.server()
    handlers = {
        "Recommend": grpc.unary_unary_rpc_method_handler(
            peer.recommend, pb.RecommendRequest.FromString, pb.RecommendReply.SerializeToString
        ),
        "Rank": grpc.unary_unary_rpc_method_handler(
            peer.rank, pb.RankRequest.FromString, pb.RankReply.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("recmill.v1.Recommender", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    http = await asyncio.start_server(peer.http, "127.0.0.1", 0)
    await server.start()
    print(port, http.sockets[0].getsockname()[1], flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(Peer(**json.loads(sys.argv[1]))))
