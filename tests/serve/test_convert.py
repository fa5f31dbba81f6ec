"""Answers as protobuf: plain items are encoded by native code, and read as if Python's messages had written them."""

from __future__ import annotations

import msgspec
import pytest

from recmill.stages.serve import messages as m
from recmill.stages.serve.proto import convert
from recmill.stages.serve.proto import recmill_pb2 as pb

PLAIN = [
    m.Item(id="i1", score=0.25, channel="two_tower", recall_score=0.5),
    m.Item(id="ü" * 200, score=0.0, channel="popular"),
    m.Item(id="", score=-0.0, channel="", recall_score=-1e30),
    m.Item(id=0, score=1, channel="similar"),
    m.Item(id=-(2**63), score=float("inf"), channel="similar"),
    m.Item(id=2**63 - 1, score=1e-45, channel="co_clicks"),
    m.Item(id="i2", score=0.5, channel="popular", boost=1.5),
]
DESCRIBED = [
    m.Item(id=1, score=1.0, channel="popular", fields={"price": 3.5}),
    m.Item(id=1, score=1.0, channel="popular", why="popular"),
    m.Item(id=1, score=1.0, channel="popular", because=[m.Reason(id=2, channel="similar", weight=0.5)]),
]


def test_items_have_no_field_that_these_cases_leave_out() -> None:
    tried = {
        name for item in (*PLAIN, *DESCRIBED) for name, value in msgspec.structs.asdict(item).items() if value
    }
    assert tried == set(m.Item.__struct_fields__)


@pytest.mark.parametrize("items", [[], PLAIN, PLAIN * 40, [*PLAIN, DESCRIBED[0]], DESCRIBED])
def test_an_encoded_answer_is_the_message_of_it(items: list[m.Item]) -> None:
    answer = m.Answer(items=items, known=False, degraded=["the store does not answer"], version="v1")
    assert pb.Answer.FromString(convert.answer_bytes(answer)) == convert.to_answer(answer)


def test_an_encoded_reply_has_all_answers_in_their_order() -> None:
    answers = [m.Answer(items=PLAIN * count, version=f"v{count}") for count in (0, 1, 50)]
    reply = pb.RecommendReply.FromString(
        convert.replies_bytes([convert.answer_bytes(one) for one in answers])
    )
    assert list(reply.answers) == [convert.to_answer(one) for one in answers]
