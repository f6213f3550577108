"""Writes the events of a streamed answer in SGLang's format, each of which repeats the answer so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.services.gateway.core import GatewayCore
from outrider.services.gateway.request import Chunk, Started
from outrider.services.gateway.round_tally import RoundTally
from outrider.services.gateway.routes.logprobs import native_input, native_output
from outrider.services.gateway.sse import json_line
from outrider.shared.base.logit_rules import LogprobParams


class _JsonList:
    """The JSON text of a list that grows."""

    def __init__(self) -> None:
        self._items = ""

    def extend(self, items: Sequence[Any]) -> None:
        """Append items."""
        if items:
            more = json_line(items)[1:-1]
            self._items = f"{self._items},{more}" if self._items else more

    def __str__(self) -> str:
        return f"[{self._items}]"


class NativeProgress:
    """The part of one sequence that has arrived. `rounds` has the counters of its rounds.

    The part is stored as JSON. Every event contains the whole part, and encoding it again for each event
    would take ever longer.
    """

    def __init__(self, core: GatewayCore, started: Started, wanted: LogprobParams, with_text: bool) -> None:
        self._core = core
        self._wanted = wanted
        self._with_text = with_text
        self._text = ""
        self._token_ids = _JsonList()
        # The fields of `meta_info` with logprobs: of the answer, and of the prompt.
        self._output = {name: _JsonList() for name in native_output(core, wanted, [], with_text)}
        self._input = ""
        self._prompt_chunks: list[Chunk] = []
        self.started = started
        self._score_prompt()
        self.num_tokens = 0
        self.cached_tokens = 0
        self.rounds = RoundTally()

    def add(self, chunk: Chunk) -> None:
        """Append a chunk."""
        self._text += json_line(chunk.text)[1:-1]
        self._token_ids.extend(chunk.token_ids)
        for name, values in native_output(self._core, self._wanted, [chunk], self._with_text).items():
            self._output[name].extend(values)
        if chunk.prompt_logprobs:
            self._prompt_chunks.append(chunk)
            self._score_prompt()
        self.num_tokens += len(chunk.token_ids)
        self.cached_tokens = chunk.cached_tokens
        self.rounds.add(chunk.drafts)

    def event(self, meta: dict[str, Any], extra: dict[str, Any]) -> str:
        """Return the event with the whole part as JSON.

        Args:
            meta: The fields of `meta_info`, without the logprobs.
            extra: Further fields of the event.
        """
        scores = "".join(f',"{name}":{values}' for name, values in self._output.items())
        meta_info = f"{json_line(meta)[:-1]}{scores}{self._input}}}"
        more = f",{json_line(extra)[1:-1]}" if extra else ""
        return f'{{"text":"{self._text}","output_ids":{self._token_ids},"meta_info":{meta_info}{more}}}'

    def _score_prompt(self) -> None:
        scores = native_input(
            self._core, self._wanted, self.started.prompt_ids, self._prompt_chunks, self._with_text
        )
        self._input = f",{json_line(scores)[1:-1]}" if scores else ""
