"""The gateway's side of `render_process`: sends chats to the process, and ends it when it takes too long."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from outrider.services.gateway.templates.render_lines import (
    MAX_REPLY_BYTES,
    chat_line,
    read_reply,
    template_line,
)
from outrider.shared.base.errors import CheckpointError, InvalidRequestError, UnavailableError
from outrider.shared.base.line_process import LineProcess, NoReplyError

START_S = 60.0
COMPILE_S = 5.0
RENDER_S = 2.0
MODULE = "outrider.services.gateway.templates.render_process"


class TemplateRenderer:
    """Renders chats with one model's template, one chat at a time.

    The template runs in a process of its own. A chat that takes longer than `RENDER_S` or needs too much
    memory ends this process. The next chat gets a new one.

    Attributes:
        source: The template's Jinja source.
        special_tokens: Maps names such as ``bos_token`` to special tokens. The template can use these names.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._process: LineProcess | None = None
        self._compiled = False
        self._closed = False
        # One thread suffices, because there is one process.
        self._thread = ThreadPoolExecutor(1, "outrider-template")

    def start(self) -> Future[Any]:
        """Start the process, and let it compile the template. The first chat would do both otherwise.

        Returns:
            A future that ends when the template is compiled. It raises CheckpointError if the template is too
            long, not valid Jinja or too expensive, and UnavailableError if the process cannot be started.
        """
        return self._thread.submit(self._compile)

    def submit(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        add_generation_prompt: bool = True,
    ) -> Future[str]:
        """Render the chat template, and return a future with the text of the prompt.

        Args:
            messages: Messages in order, each with ``role`` and ``content``. All values must be JSON.
            options: Additional variables for the template.
            add_generation_prompt: Whether the prompt ends with the header of the assistant's answer.

        Returns:
            A future. It raises InvalidRequestError if the template rejects the messages, fails while
            rendering, or exceeds its limits. It raises the errors of `start` if the process was not running.
        """
        return self._thread.submit(self._render, messages, options, add_generation_prompt)

    def close(self) -> None:
        """End the process. A chat that is being rendered fails."""
        self._closed = True
        if self._process is not None:
            self._process.interrupt()
        self._thread.shutdown(cancel_futures=True)
        if self._process is not None:
            self._process.kill()

    def _render(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], generate: bool
    ) -> str:
        """Render on the renderer's thread."""
        process = self._compile()
        try:
            process.send(chat_line(messages, options, generate))
            text, error = read_reply(process.read(RENDER_S))
        except NoReplyError as failure:
            self._launch()
            limit = f"it takes longer than {RENDER_S:g} s" if failure.late else "it needs too much memory"
            error = f"The model's chat template fails on these messages: {limit}."
        if error:
            raise InvalidRequestError(error, field="messages")
        return text

    def _launch(self) -> LineProcess:
        """Start a process in place of the current one, and send it the template."""
        if self._process is not None:
            self._process.kill()
        try:
            self._process = LineProcess([sys.executable, "-m", MODULE], MAX_REPLY_BYTES)
        except OSError as error:
            raise UnavailableError(
                f"The process that renders chat templates cannot be started: {error}.", retry_after_s=1.0
            ) from None
        self._compiled = False
        if self._closed:
            self._process.kill()
        return self._process

    def _compile(self) -> LineProcess:
        """Return a running process that has compiled the template."""
        process = self._process
        if process is None or not process.running:
            process = self._launch()
        if not self._compiled:
            try:
                process.send(template_line(self.source, self.special_tokens))
                process.read(START_S)
                _, error = read_reply(process.read(COMPILE_S))
            except NoReplyError as failure:
                process.kill()
                limit = (
                    f"it takes longer than {COMPILE_S:g} s" if failure.late else "it needs too much memory"
                )
                error = f"The chat template cannot be compiled: {limit}."
            if error:
                raise CheckpointError(error, field="chat_template")
            self._compiled = True
        return process
