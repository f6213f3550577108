"""`outrider bench forms`: compares the accept lengths of answers with and without a JSON schema.

Each prompt is asked twice, over REST at batch 1 and temperature 0: with a schema that suits its topic, and
without. Both answers end where the model ends them. Only tokens within the answers count. The first token of
an answer does not count, because the prefill chooses it.

For the answers with a schema, the result also tells in which part of the answer the rounds ended. A round
ends at the first token that neither the draft nor the schema has predicted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.bench.measure.form_parts import Part, parts_of
from outrider.bench.report.record import Result, Row, show_and_save
from outrider.services.clients.rest import RestClient, StreamedReply
from outrider.services.stack.options import StackOptions
from outrider.services.stack.started_services import started_services
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.obs.progress import Progress
from outrider.shared.spec.tree import DraftShape

FORM_PROMPTS = Path(__file__).resolve().parents[1] / "prompts" / "schemas.jsonl"
FREE, FORMED = "free", "schema"


@dataclass(frozen=True, slots=True)
class FormsOptions:
    """Options of the measurement.

    Attributes:
        stack: The services to start.
        prompts: File of prompts with schemas, one JSON object per line.
        num_prompts: Number of prompts to use. None uses all.
        tokens: Largest number of tokens of an answer.
        shape: The trees to draft.
        output: The JSON file.
    """

    stack: StackOptions
    prompts: Path
    num_prompts: int | None
    tokens: int
    shape: DraftShape
    output: Path


@dataclass(frozen=True, slots=True)
class FormPrompt:
    """A prompt, its topic, and the JSON schema of the answer."""

    topic: str
    prompt: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FormAnswer:
    """The rounds of one answer.

    Attributes:
        prompt: The prompt and its schema.
        formed: True if the answer follows the schema.
        text: The whole text.
        rounds: For each round, the texts of the tokens that it emitted.
        complete: True if the model ended the answer.
    """

    prompt: FormPrompt
    formed: bool
    text: str
    rounds: Sequence[Sequence[str]]
    complete: bool

    @property
    def tokens(self) -> int:
        """Number of tokens that rounds emitted."""
        return sum(map(len, self.rounds))

    def parts(self) -> list[list[Part | None]]:
        """Return for each round the parts of its tokens. None stands for a token without text."""
        parts = parts_of(self.text, self.prompt.schema)
        at = len(self.text) - sum(len(token) for tokens in self.rounds for token in tokens)
        found: list[list[Part | None]] = []
        for tokens in self.rounds:
            found.append([])
            for token in tokens:
                found[-1].append(parts[at] if token and at < len(parts) else None)
                at += len(token)
        return found


def load_form_prompts(path: Path, count: int | None) -> list[FormPrompt]:
    """Read prompts with schemas. With `count`, take as many evenly from the whole file.

    Raises:
        ConfigurationError: The file is missing, has fewer prompts, or a line lacks a field.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigurationError(
            f"Cannot read the prompts {path}: {error.strerror}.", field="--prompts"
        ) from None
    count = len(lines) if count is None else count
    if not 0 < count <= len(lines):
        raise ConfigurationError(
            f"{path} contains {len(lines)} prompts, but --num-prompts is {count}.", field="--num-prompts"
        )
    found = []
    for number in (index * len(lines) // count for index in range(count)):
        record = json.loads(lines[number])
        if missing := {"topic", "prompt", "schema"} - set(record):
            raise ConfigurationError(
                f"{path}:{number + 1} has no field {', '.join(sorted(missing))}.", field="--prompts"
            )
        found.append(FormPrompt(record["topic"], record["prompt"], record["schema"]))
    return found


def run_forms(options: FormsOptions) -> int:
    """Run `outrider bench forms`: start a stack, ask every prompt twice, print and write the figures.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: The stack cannot be started, or the prompts cannot be read.
    """
    prompts = load_form_prompts(options.prompts, options.num_prompts)
    answers = []
    with (
        started_services(options.stack) as stack,
        RestClient(stack.url) as client,
        Progress("forms", 2 * len(prompts)) as progress,
    ):
        for prompt in prompts:
            for formed in (False, True):
                answers.append(_ask(client, prompt, formed, options))
                progress.advance()
    shape = options.shape
    settings = {
        "device": options.stack.device,
        "prompts": len(prompts),
        "max_tokens": options.tokens,
        "temperature": 0,
        "num_steps": shape.depth,
        "topk": shape.topk,
        "num_draft_tokens": shape.max_nodes,
    }
    more = {"answers": [as_json(answer) for answer in answers]}
    return show_and_save(
        Result("forms", settings, rows_of(answers), more), options.output, ("tokens", "rounds", "answers")
    )


def _ask(client: RestClient, prompt: FormPrompt, formed: bool, options: FormsOptions) -> FormAnswer:
    shape = options.shape
    body: dict[str, Any] = {
        "max_tokens": options.tokens,
        "temperature": 0,
        "speculation": {
            "mode": "on",
            "depth": shape.depth,
            "topk": shape.topk,
            "max_nodes": shape.max_nodes,
            "trace": True,
        },
    }
    if formed:
        schema = {"name": prompt.topic, "schema": prompt.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    reply, rounds = StreamedReply(), []
    messages = [{"role": "user", "content": prompt.prompt}]
    for _, trace in client.stream_chat_events(messages, body, reply):
        if trace:
            rounds.append(list(trace["emitted_text"]))
    if rounds and rounds[-1] and not reply.text.endswith(rounds[-1][-1]):
        # The trace names the token that ended the answer, which is not part of the text.
        rounds[-1][-1] = ""
    return FormAnswer(prompt, formed, reply.text, rounds, reply.finish_reason == "stop")


def rows_of(answers: Sequence[FormAnswer]) -> list[Row]:
    """Return the figures: the ratio of the accept lengths, the accept lengths, and the parts of the answers.

    The accept length of a part is the mean number of tokens of the rounds that ended in this part.
    """
    rows = [
        _accept_length(
            f"{kind}{topic and f', {topic}'}", [one for one in chosen if topic in ("", one.prompt.topic)]
        )
        for kind, chosen in ((FORMED, _of(answers, True)), (FREE, _of(answers, False)))
        for topic in ["", *sorted({one.prompt.topic for one in chosen})]
    ]
    ends: Counter[Part] = Counter()
    emitted: Counter[Part] = Counter()
    written: Counter[Part] = Counter()
    for answer in _of(answers, True):
        for parts in answer.parts():
            known = [part for part in parts if part is not None]
            written.update(known)
            end = known[-1] if known else Part.STRUCTURE
            ends[end] += 1
            emitted[end] += len(parts)
    of_parts = [
        Row(
            f"{FORMED}, rounds that end in {part.value}",
            round(emitted[part] / ends[part], 3),
            "tokens per round",
            more={"tokens": emitted[part], "rounds": ends[part], "tokens_of_this_part": written[part]},
        )
        for part in Part
        if ends[part]
    ]
    by_case = {row.case: row for row in rows}
    free, formed = by_case[FREE].value, by_case[FORMED].value
    return [Row(f"{FORMED} ÷ {FREE}", round(formed / free, 3), "×"), *rows, *of_parts]


def _of(answers: Sequence[FormAnswer], formed: bool) -> list[FormAnswer]:
    return [answer for answer in answers if answer.formed is formed]


def _accept_length(case: str, answers: Sequence[FormAnswer]) -> Row:
    tokens, rounds = (
        sum(one.tokens for one in answers),
        sum(len(one.rounds) for one in answers),
    )
    more = {"tokens": tokens, "rounds": rounds, "answers": len(answers)}
    return Row(case, round(tokens / max(1, rounds), 3), "tokens per round", more=more)


def as_json(answer: FormAnswer) -> dict[str, Any]:
    """Return one answer as JSON values."""
    return {
        "topic": answer.prompt.topic,
        "prompt": answer.prompt.prompt,
        "schema": answer.prompt.schema if answer.formed else None,
        "text": answer.text,
        "complete": answer.complete,
        "tokens_of_rounds": [len(tokens) for tokens in answer.rounds],
    }
