"""Structured logging to stderr: one event per line, with request ids from the context.

Text of prompts appears only at level DEBUG.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO, cast

import structlog
from structlog.contextvars import bound_contextvars as log_context
from structlog.typing import FilteringBoundLogger, Processor

from outrider.shared.obs.printable import printable
from outrider.shared.obs.queued_stream import QueuedStream

__all__ = ["configure_logging", "get_logger", "log_context"]


def configure_logging(
    service: str, level: str = "info", json: bool = False, stream: TextIO | None = None
) -> None:
    """Route structlog and the standard library's loggers to one handler. Call once, at start-up.

    Args:
        service: Service name, added to every JSON object as ``service``.
        level: A level name of the standard library.
        json: If true, write one JSON object per line instead of human-readable text.
        stream: Output stream; stderr by default.
    """
    stream = stream or sys.stderr
    if isinstance(stream, QueuedStream):
        stream.json_service = service if json else None

    def add_service(
        _logger: Any, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        # In text, the name of the logger identifies the service.
        if json:
            event.setdefault("service", service)
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        add_service,
        _escape_values,
    ]
    final: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if json:
        final += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        final += [
            _to_milliseconds,
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty(),
                exception_formatter=structlog.dev.plain_traceback,
                pad_event_to=0,
                pad_level=False,
            ),
        ]

    handler = logging.StreamHandler(stream)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=final))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # These libraries log too much at INFO; show their warnings and errors only.
    for name in ("httpx", "httpcore", "asyncio", "grpc", "uvicorn.access", "uvicorn.error"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))

    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _to_milliseconds(
    _logger: Any, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Shorten the time of a line to milliseconds."""
    event["timestamp"] = f"{str(event['timestamp'])[:23]}Z"
    return event


def _escape_values(
    _logger: Any, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Escape control characters in all texts, because the texts may come from clients or other libraries.

    Tracebacks keep their line breaks, because they are rendered later.
    """
    for key, value in event.items():
        if type(value) is str and not value.isprintable():
            event[key] = printable(value)
    return event


def get_logger(name: str) -> FilteringBoundLogger:
    """Return a logger.

    The keyword arguments of its methods become fields of the event: ``log.info("draft connected",
    address=address)``.
    """
    return cast(FilteringBoundLogger, structlog.stdlib.get_logger(name))
