"""Tensors on the wire: round trips are exact, and damaged, misordered or oversized data is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.common.v1 import common_pb2
from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.tensors import (
    WIRE_OF_DTYPE,
    decode_tensor,
    encode_tensor,
    join_tensors,
    split_tensor,
)

LIMIT = 1 << 20


def random_tensor(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape) * 100).to(dtype)


@given(shape=st.lists(st.integers(0, 5), max_size=4), dtype=st.sampled_from(list(WIRE_OF_DTYPE)))
def test_inline_round_trip(shape: list[int], dtype: torch.dtype) -> None:
    tensor = random_tensor(shape, dtype)
    back = decode_tensor(encode_tensor(tensor))
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=3), chunk=st.integers(1, 40)
)
def test_chunk_round_trip_of_several_tensors_in_one_stream(shapes: list[list[int]], chunk: int) -> None:
    tensors = {f"t{index}": random_tensor(shape, torch.bfloat16) for index, shape in enumerate(shapes)}
    stream = [piece for name, tensor in tensors.items() for piece in split_tensor(name, tensor, chunk)]
    joined = dict(join_tensors(stream, max_bytes=LIMIT))
    assert joined.keys() == tensors.keys()
    assert all(torch.equal(joined[name], tensor) for name, tensor in tensors.items())


def test_transposed_views_are_sent_row_major() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3).T
    assert torch.equal(decode_tensor(encode_tensor(tensor)), tensor)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (
            common_pb2.TensorData(shape=[2, 2], dtype=common_pb2.DATA_TYPE_FLOAT32, inline=b"123"),
            "do not fill",
        ),
        (
            common_pb2.TensorData(shape=[1], dtype=common_pb2.DATA_TYPE_UNSPECIFIED, inline=b"1234"),
            "unknown data type",
        ),
        (
            common_pb2.TensorData(shape=[1] * 9, dtype=common_pb2.DATA_TYPE_FLOAT32, inline=b"1234"),
            "dimensions",
        ),
        (common_pb2.TensorData(shape=[1], dtype=common_pb2.DATA_TYPE_FLOAT32), "inline"),
        (
            common_pb2.TensorData(shape=[1, 1], dtype=common_pb2.DATA_TYPE_FLOAT32, inline=b"1234"),
            r"\[rows, 2\]",
        ),
    ],
)
def test_bad_inline_tensors_are_refused_by_name(data: common_pb2.TensorData, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint) as caught:
        decode_tensor(data, name="frame.features", columns=2)
    assert caught.value.field == "frame.features"


def chunks() -> list[common_pb2.TensorChunk]:
    return list(split_tensor("fc.weight", torch.arange(10, dtype=torch.float32), 16))


def test_every_kind_of_damage_in_a_chunk_stream_is_refused() -> None:
    flipped = chunks()
    flipped[1].data = bytes(16)
    no_name = chunks()
    no_name[0].name = ""
    wrong_digest = chunks()
    wrong_digest[-1].sha256 = bytes(32)
    too_long = chunks()
    too_long[0].shape[0] = 9
    for stream, complaint in [
        (flipped, "SHA-256"),
        (wrong_digest, "SHA-256"),
        (no_name, "name"),
        (too_long, "more bytes"),
        (chunks()[:-1], "ended"),
        (chunks()[::2], "expected 16"),
    ]:
        with pytest.raises(ProtocolError, match=complaint):
            list(join_tensors(stream, max_bytes=LIMIT))


def test_nothing_above_the_limit_is_allocated() -> None:
    header = common_pb2.TensorChunk(
        name="lm_head.weight", shape=[1 << 40], dtype=common_pb2.DATA_TYPE_FLOAT32, data=b""
    )
    with pytest.raises(ProtocolError, match="exceed"):
        list(join_tensors([header], max_bytes=LIMIT))
