"""Converts tensors to and from protobuf: one inline `TensorData`, or a stream of `TensorChunk`s for weights.

Every field of a received message is checked before use: dtype, shape, number of bytes, order of chunks, size
limits and SHA-256. The gateway must not import this module, because the module imports torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Protocol

import numpy as np
import torch

from outrider.common.v1 import common_pb2
from outrider.shared.base.errors import ProtocolError

CPU = torch.device("cpu")
MAX_CHUNK_BYTES = 1024 * 1024
MAX_DIMENSIONS = 8

WIRE_OF_DTYPE: Mapping[torch.dtype, common_pb2.DataType.ValueType] = {
    torch.float32: common_pb2.DATA_TYPE_FLOAT32,
    torch.float16: common_pb2.DATA_TYPE_FLOAT16,
    torch.bfloat16: common_pb2.DATA_TYPE_BFLOAT16,
    torch.int32: common_pb2.DATA_TYPE_INT32,
    torch.int64: common_pb2.DATA_TYPE_INT64,
}
DTYPE_OF_WIRE: Mapping[int, torch.dtype] = {wire: dtype for dtype, wire in WIRE_OF_DTYPE.items()}


def wire_dtype(dtype: torch.dtype) -> common_pb2.DataType.ValueType:
    """Return the protobuf value of a torch dtype. Raise ProtocolError if the dtype has no protobuf value."""
    wire = WIRE_OF_DTYPE.get(dtype)
    if wire is None:
        raise ProtocolError(
            f"Tensors of dtype {dtype} cannot be sent. Supported: "
            f"{', '.join(str(known) for known in WIRE_OF_DTYPE)}."
        )
    return wire


def torch_dtype(wire: int, name: str = "tensor") -> torch.dtype:
    """Return the torch dtype for a dtype value in a protobuf message.

    Raises:
        ProtocolError: This build does not support the value. The error text begins with `name`, the name of
            the message's field.
    """
    dtype = DTYPE_OF_WIRE.get(wire)
    if dtype is None:
        raise ProtocolError(
            f"{name}: unknown data type {wire}; the peer may run another release.", field=name
        )
    return dtype


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in host memory, or the tensor itself if the tensor is there already.

    Copies from a GPU use pinned memory, which torch caches.
    """
    if not tensor.is_cuda:
        return tensor
    with torch.inference_mode(False):
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the row-major little-endian bytes of a tensor on any device."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def encode_tensor(tensor: torch.Tensor) -> common_pb2.TensorData:
    """Return a tensor on any device as one inline message. A tensor on a GPU is first copied to the host."""
    data = common_pb2.TensorData()
    fill_tensor(data, tensor)
    return data


def fill_tensor(data: common_pb2.TensorData, tensor: torch.Tensor) -> None:
    """Write the tensor into an empty message.

    Compared with `encode_tensor`, this avoids one copy of all bytes.
    """
    data.shape.extend(tensor.shape)
    data.dtype = wire_dtype(tensor.dtype)
    data.inline = tensor_bytes(tensor)


class TensorWriter(Protocol):
    """Interface to send tensors: writes rows into a message, or into memory that the reader has mapped.

    Only one thread at a time may use a writer.
    """

    def write(self, parts: Sequence[torch.Tensor]) -> common_pb2.TensorData:
        """Concatenate tensors ``[rows, columns]`` of one dtype by rows, and return the message for them.

        The caller may change the tensors after this call.
        """
        ...


class TensorReader(Protocol):
    """Reads the messages of a `TensorWriter`. Used by one thread at a time."""

    def read(self, data: common_pb2.TensorData, name: str, columns: int) -> torch.Tensor:
        """Return the ``[rows, columns]`` tensor of a message as a new tensor.

        Raises:
            ProtocolError: The data is malformed, or the message uses another transport than this reader. The
                error text begins with `name`, the name of the field.
        """
        ...

    def close(self) -> None:
        """Release the memory shared with the writer."""
        ...


class InlineTensors:
    """A `TensorWriter` and `TensorReader` for messages that contain the tensors' bytes.

    Args:
        device: Device of the tensors that `read` returns. If it is a GPU, `read` enqueues the copy and does
            not wait.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device

    def write(self, parts: Sequence[torch.Tensor]) -> common_pb2.TensorData:
        """Return the concatenated parts as an inline message."""
        return encode_tensor(parts[0] if len(parts) == 1 else torch.cat(list(parts)))

    def read(self, data: common_pb2.TensorData, name: str, columns: int) -> torch.Tensor:
        """Return the tensor of an inline message, on this reader's device."""
        return decode_tensor(data, name=name, columns=columns, device=self._device)

    def close(self) -> None:
        """Do nothing: no memory is shared."""


def decode_tensor(
    data: common_pb2.TensorData,
    *,
    name: str = "tensor",
    columns: int | None = None,
    device: torch.device = CPU,
) -> torch.Tensor:
    """Return the tensor whose bytes a message contains, as a new tensor.

    Args:
        data: The message.
        name: Name of the tensor, for error messages.
        columns: If given, the shape of the tensor must be ``[rows, columns]``, with any number of rows.
        device: Device of the result. On a GPU, the tensor is ready in stream order. The copy uses pinned
            memory, which torch caches.

    Raises:
        ProtocolError: The message is not inline, its dtype is unknown, its byte count does not match its
            shape, or the shape is not ``[rows, columns]``.
    """
    if data.WhichOneof("data") != "inline":
        raise ProtocolError(
            f"{name}: only inline tensors are accepted on this transport, not {data.WhichOneof('data')}.",
            field=name,
        )
    payload = data.inline  # read the field once, because every access makes a copy
    shape, dtype = read_shape(data, len(payload), name, columns)
    if device.type != "cuda" or not payload:
        return _from_bytes(bytearray(payload), shape, dtype).to(device)
    with torch.cuda.device(device), torch.inference_mode(False):
        host = torch.empty(shape, dtype=dtype, pin_memory=True)
        host.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(payload, dtype=np.uint8)
        return host.to(device, non_blocking=True)


def read_shape(
    data: common_pb2.TensorData, num_bytes: int, name: str = "tensor", columns: int | None = None
) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of a message with `num_bytes` of data.

    Raises the same errors as `decode_tensor`.
    """
    dtype = torch_dtype(data.dtype, name)
    shape = _checked_shape(data.shape, name)
    if num_bytes != prod(shape) * dtype.itemsize:
        raise ProtocolError(
            f"{name}: {num_bytes} bytes do not fill shape {list(shape)} of {dtype}.", field=name
        )
    if columns is not None and (len(shape) != 2 or shape[1] != columns):
        raise ProtocolError(f"{name}: expected shape [rows, {columns}], not {list(shape)}.", field=name)
    return shape, dtype


def split_tensor(
    name: str, tensor: torch.Tensor, max_chunk_bytes: int = MAX_CHUNK_BYTES
) -> Iterator[common_pb2.TensorChunk]:
    """Yield a tensor in chunks.

    The first chunk has name, shape and dtype. The last chunk has the SHA-256 of all bytes.
    """
    payload = tensor_bytes(tensor)
    digest = hashlib.sha256(payload).digest()
    for offset in range(0, max(len(payload), 1), max_chunk_bytes):
        chunk = common_pb2.TensorChunk(offset=offset, data=payload[offset : offset + max_chunk_bytes])
        if offset == 0:
            chunk.name = name
            chunk.shape.extend(tensor.shape)
            chunk.dtype = wire_dtype(tensor.dtype)
        if offset + max_chunk_bytes >= len(payload):
            chunk.sha256 = digest
        yield chunk


def join_tensors(
    chunks: Iterable[common_pb2.TensorChunk], *, max_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a (name, tensor) pair for each tensor of a chunk stream, as soon as the tensor is complete.

    Args:
        chunks: Chunks of one or more tensors, one after the other, as made by `split_tensor`.
        max_bytes: Size of the largest accepted tensor. Memory for a larger tensor is never allocated.

    Raises:
        ProtocolError: A chunk is out of order, a tensor is too large or has a wrong size, a digest does not
            match, or the stream ends inside a tensor. The message names the tensor.
    """
    name = ""
    shape: tuple[int, ...] = ()
    dtype = torch.float32
    payload: bytearray | None = None
    for chunk in chunks:
        if payload is None:
            name, shape, dtype = _read_header(chunk, max_bytes)
            payload = bytearray()
        if chunk.offset != len(payload):
            raise ProtocolError(f"{name}: chunk at byte {chunk.offset}, expected {len(payload)}.", field=name)
        payload += chunk.data
        total = prod(shape) * dtype.itemsize
        if len(payload) > total:
            raise ProtocolError(
                f"{name}: more bytes than shape {list(shape)} of {dtype} holds ({total}).", field=name
            )
        if len(payload) < total:
            if not chunk.data or chunk.sha256:
                raise ProtocolError(
                    f"{name}: the stream stops at byte {len(payload)} of {total}.", field=name
                )
            continue
        if hashlib.sha256(payload).digest() != chunk.sha256:
            raise ProtocolError(
                f"{name}: the SHA-256 does not match; the tensor was damaged on the way.", field=name
            )
        yield name, _from_bytes(payload, shape, dtype)
        payload = None
    if payload is not None:
        raise ProtocolError(
            f"{name}: the stream ended at byte {len(payload)} of {prod(shape) * dtype.itemsize}.", field=name
        )


def _read_header(chunk: common_pb2.TensorChunk, max_bytes: int) -> tuple[str, tuple[int, ...], torch.dtype]:
    if not chunk.name:
        raise ProtocolError("The first chunk of a tensor must carry its name.", field="chunk.name")
    dtype = torch_dtype(chunk.dtype, chunk.name)
    shape = _checked_shape(chunk.shape, chunk.name)
    if prod(shape) * dtype.itemsize > max_bytes:
        raise ProtocolError(
            f"{chunk.name}: {prod(shape) * dtype.itemsize} bytes exceed the limit of {max_bytes}.",
            field=chunk.name,
        )
    return chunk.name, shape, dtype


def _checked_shape(shape: Iterable[int], name: str) -> tuple[int, ...]:
    checked = tuple(shape)
    if len(checked) > MAX_DIMENSIONS:
        raise ProtocolError(
            f"{name}: {len(checked)} dimensions; at most {MAX_DIMENSIONS} are accepted.", field=name
        )
    return checked


def _from_bytes(payload: bytearray, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if not payload:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(payload, dtype=dtype).reshape(shape)
