"""The table of options.

`scripts/option_sources.py` writes the fields of both APIs from this table: the bodies of the messages in the
protos, and the classes in `schemas/option_fields`. The gateway reads and checks requests with it.

To add an option, add a row to one of the `*_rows` files and run the script. An option that both APIs read in
the same way also needs an attribute of `Parameters` or of `RequestedRules`.
"""

from __future__ import annotations

from outrider.services.gateway.options.output_rows import OUTPUT_ROWS
from outrider.services.gateway.options.request_rows import INPUT_ROWS, PROMPT_ROWS, TOOL_ROWS
from outrider.services.gateway.options.rows import GrpcField, Reader, RequestOption
from outrider.services.gateway.options.sampling_rows import SAMPLING_ROWS

OPTIONS: tuple[RequestOption, ...] = (*INPUT_ROWS, *SAMPLING_ROWS, *OUTPUT_ROWS, *PROMPT_ROWS, *TOOL_ROWS)
"""All options."""

READ_OPTIONS: tuple[RequestOption, ...] = tuple(one for one in OPTIONS if one.reader is not Reader.ROUTE)
"""The options that `options.values` reads from REST bodies, and `convert` from gRPC messages."""


def grpc_path(field: GrpcField) -> str:
    """Return the path of a field from the request's message, such as ``options.sampling.top_p``."""
    holder = next((one for one in OPTIONS if one.holds == field.message), None)
    return field.name if holder is None else f"{grpc_path(holder.grpc[0])}.{field.name}"
