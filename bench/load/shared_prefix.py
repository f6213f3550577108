"""`outrider bench prefix`: measures the share of prompt tokens that a server finds in its prefix cache.

All chats begin with the same system prompt. Each turn of a chat repeats the earlier turns and their answers,
and adds new tokens. The chats run once without speculation and once with it. Each run starts with an empty
cache. Afterwards, the command sends long prompts twice. It also sends some conversations twice, and compares
the accept lengths of the two answers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import httpx

from outrider.bench.load.lone import LoneConnection
from outrider.bench.load.server import find_server, key_headers, refusal
from outrider.bench.measure.prompts import HELDOUT_PROMPTS, Messages, load_prompts
from outrider.bench.report.record import Result, Row, show_and_save
from outrider.services.clients.server_trust import server_trust
from outrider.services.stack.options import StackOptions
from outrider.services.stack.started_services import started_services
from outrider.shared.base.errors import ConfigurationError, UnavailableError
from outrider.shared.obs.progress import Progress

FIRST_ID = 10
"""Lowest token id of the prompts. Lower ids are often special tokens."""
TIMEOUT_S = 600.0
REPEATS = 5
"""Pairs of equal long prompts; the figures are their medians."""
TALKS, TALK_REQUESTS, TALK_TOKENS = 12, 3, 128
"""Number of conversations whose accept lengths are compared, requests of each, and tokens per answer."""
LENGTHS = "--system-tokens, --turn-tokens, --answer-tokens, --turns or --long-prompt"


@dataclass(frozen=True, slots=True)
class Chats:
    """Number and lengths of the chats that `outrider bench prefix` sends.

    Attributes:
        count, turns: Number of chats, and number of turns of each chat.
        system, turn, answer: Number of tokens of the system prompt, of each turn of the user, and of each
            answer.
        vocab: All token ids are below this number.
        seed: Seed of the random tokens.
    """

    count: int
    turns: int
    system: int
    turn: int
    answer: int
    vocab: int
    seed: int = 0

    def tokens(self, name: object, count: int) -> list[int]:
        """Return random tokens. Equal names give equal tokens."""
        draw = random.Random(f"{self.seed} {name}")
        return [draw.randrange(FIRST_ID, self.vocab) for _ in range(count)]

    def prompt(self, chat: int, turn: int, before: Sequence[int]) -> list[int]:
        """Return the prompt of one turn.

        Args:
            chat, turn: Numbers of the chat and of the turn, from 0.
            before: The previous turn's prompt and its answer. Empty for the first turn.
        """
        start = list(before) or self.tokens("system", self.system)
        return [*start, *self.tokens((chat, turn), self.turn)]

    def possible(self, chat: int, turn: int, before: Sequence[int]) -> int:
        """Return how many tokens of a prompt the server would find in a prefix cache of unlimited size.

        The last token of an answer is not found, because the server never computes its K/V.
        """
        if turn:
            return len(before) - 1
        return self.system if chat else 0


@dataclass(slots=True)
class Hits:
    """Token and round counts of all chats of one run.

    Attributes:
        prompt, found, possible: Number of prompt tokens, number of prompt tokens that the server found in its
            cache, and number of prompt tokens that it could have found.
        accepted, rounds: Number of accepted draft tokens, and number of rounds with drafts.
        seconds: Duration of the run, in seconds.
    """

    prompt: int = 0
    found: int = 0
    possible: int = 0
    accepted: int = 0
    rounds: int = 0
    seconds: float = 0.0

    def add(self, prompt: Sequence[int], possible: int, meta: dict[str, Any]) -> None:
        """Count one answer, given its `meta_info`."""
        self.prompt += len(prompt)
        self.possible += possible
        self.found += meta["cached_tokens"]
        self.accepted += meta.get("spec_num_correct_drafts", 0)
        self.rounds += meta.get("spec_verify_ct", 0)


@dataclass(frozen=True, slots=True)
class PrefixOptions:
    """Options of `outrider bench prefix`. The fields are its flags.

    Attributes:
        stack: The stack to start if no address is given.
        url: Address of a running server.
        long_prompt: Number of tokens of the prompt that is sent twice.
        clients: Number of chats that run at the same time.
    """

    stack: StackOptions
    url: str | None
    api_key: str | None
    chats: Chats
    long_prompt: int
    clients: int
    output: Path | None


def run_prefix(options: PrefixOptions) -> int:
    """Run `outrider bench prefix`: run the chats, print the table and save the result. Returns 0.

    Raises:
        ConfigurationError: The stack cannot be started, or the server refuses a request.
        UnavailableError: No server answers at the address.
    """
    with ExitStack() as cleanup:
        url = options.url
        if url is None:
            cleanup.enter_context(started_services(options.stack))
            url = f"http://127.0.0.1:{options.stack.port}"
        server = find_server(url, options.api_key)
        if not server.is_outrider:
            raise ConfigurationError(
                f"--url: the server ({server.owner or 'unknown'}) is not Outrider.", field="--url"
            )
        off, on, times, lengths = asyncio.run(_measure(options, server.url))
    settings = {
        "device": options.stack.device if options.url is None else "remote",
        "server": server.as_json(),
        "chats": options.chats.count,
        "turns": options.chats.turns,
        "system_tokens": options.chats.system,
        "turn_tokens": options.chats.turn,
        "answer_tokens": options.chats.answer,
        "long_prompt": options.long_prompt,
        "clients": options.clients,
        "acceptance": "real",
    }
    rows = [
        Row(f"prompt tokens found, speculation {name}", hits.found, "tokens", hits.possible, "possible")
        for name, hits in (("off", off), ("auto", on))
    ]
    rows += [
        Row("a long prompt, the first time", statistics.median(times[0]), "ms"),
        Row("the same prompt again", statistics.median(times[1]), "ms"),
    ]
    if lengths is not None:
        first, second = lengths
        rows.append(Row("accept length of a second, equal prompt", second, "tokens", first, "the first"))
    more = {
        name: {
            "prompt_tokens": hits.prompt,
            "hit_rate": round(hits.found / hits.prompt, 4),
            "of_possible": round(hits.found / max(hits.possible, 1), 4),
            "accept_length": round(1 + hits.accepted / hits.rounds, 4) if hits.rounds else None,
            "seconds": round(hits.seconds, 2),
        }
        for name, hits in (("off", off), ("auto", on))
    }
    return show_and_save(Result("prefix", settings, rows, more), options.output)


async def _measure(
    options: PrefixOptions, url: str
) -> tuple[Hits, Hits, tuple[list[float], list[float]], tuple[float, float] | None]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url,
        headers=key_headers(options.api_key),
        timeout=TIMEOUT_S,
        limits=limits,
        trust_env=False,
        verify=server_trust(url),
    ) as client:
        requests = 2 * options.chats.count * options.chats.turns + 2 * REPEATS + TALK_REQUESTS * TALKS
        with Progress("prefix", requests) as progress:
            off = await _chat(client, options, "off", progress)
            on = await _chat(client, options, "auto", progress)
            times: tuple[list[float], list[float]] = ([], [])
            for pair in range(REPEATS):
                prompt = options.chats.tokens(f"long {pair}", options.long_prompt)
                for measured in times:
                    measured.append(_ttft_ms(options, url, prompt))
                    progress.advance(step="long prompts")
            return off, on, times, await measure_accept_lengths(client, progress)


async def measure_accept_lengths(client: httpx.AsyncClient, progress: Progress) -> tuple[float, float] | None:
    """Send several conversations twice, and return the accept lengths of the first and the second answers.

    A conversation consists of a prompt, the server's answer to it, and a second prompt. The prompts are part
    of `bench`. The first answer finds nothing in the prefix cache. All answers are greedy. The result is None
    if the server has no chat template or does not speculate.

    Args:
        client: Client of the server.
        progress: Advances by 1 with each answer.
    """
    counts = ([0, 0], [0, 0])
    for index, (before, prompt) in enumerate(itertools.pairwise(load_prompts(HELDOUT_PROMPTS, TALKS + 1))):
        opening = await _complete(client, before, "before")
        if opening is None:
            return None
        progress.advance(step="accept lengths")
        answer = opening["choices"][0]["message"]["content"]
        messages = [*before, {"role": "assistant", "content": answer}, *prompt]
        for count in counts:
            # The salt lets the first answer find nothing, not even the shorter conversation.
            reply = await _complete(client, messages, f"talk {index}")
            progress.advance(step="accept lengths")
            report = (reply or {}).get("speculation") or {}
            if report.get("draft_tokens"):
                count[0] += report["accepted_tokens"]
                count[1] += sum(report["accepted_histogram"])
    if not all(rounds for _, rounds in counts):
        return None
    first, second = (1 + accepted / rounds for accepted, rounds in counts)
    return first, second


async def _complete(client: httpx.AsyncClient, messages: Messages, salt: str) -> dict[str, Any] | None:
    """Return a greedy answer to a conversation. None if the server refuses conversations."""
    body = {
        "messages": messages,
        "max_tokens": TALK_TOKENS,
        "temperature": 0.0,
        "cache_salt": salt,
        "speculation": {"mode": "on"},
    }
    response = await client.post("/v1/chat/completions", json=body)
    if response.status_code == httpx.codes.BAD_REQUEST:
        return None
    response.raise_for_status()
    reply: dict[str, Any] = response.json()
    return reply


async def _chat(client: httpx.AsyncClient, options: PrefixOptions, mode: str, progress: Progress) -> Hits:
    """Run all chats, `clients` at a time, from an empty cache."""
    (await client.post("/flush_cache")).raise_for_status()
    hits, chats = Hits(), options.chats
    waiting = iter(range(1, chats.count))

    async def converse(chat: int) -> None:
        before: list[int] = []
        for turn in range(chats.turns):
            prompt = chats.prompt(chat, turn, before)
            reply = await _generate(client, prompt, chats.answer, mode)
            hits.add(prompt, chats.possible(chat, turn, before), reply["meta_info"])
            before = [*prompt, *reply["output_ids"]]
            progress.advance(step=f"chats, speculation {mode}")

    async def converse_on() -> None:
        for chat in waiting:
            await converse(chat)

    began = time.perf_counter()
    await converse(0)  # stores the system prompt
    await asyncio.gather(*(converse_on() for _ in range(options.clients)))
    hits.seconds = time.perf_counter() - began
    return hits


def _ttft_ms(options: PrefixOptions, url: str, prompt: Sequence[int]) -> float:
    """Return the milliseconds until a plain answer of one token is complete. Blocks the event loop."""
    connection = LoneConnection(url, key_headers(options.api_key), TIMEOUT_S)
    try:
        body = _body(prompt, 1, "off")
        reply = connection.post("/generate", json.dumps(body).encode())
    except (OSError, HTTPException) as error:
        raise UnavailableError(f"The connection to the server broke: {error}.", field="--url") from None
    finally:
        connection.close()
    if reply.status != httpx.codes.OK:
        raise refusal(reply.status, reply.body.decode(errors="replace"), body, LENGTHS, "--url")
    return reply.seconds * 1e3


def _body(prompt: Sequence[int], new_tokens: int, mode: str) -> dict[str, Any]:
    return {
        "input_ids": list(prompt),
        "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True},
        "speculation": {"mode": mode},
    }


async def _generate(
    client: httpx.AsyncClient, prompt: Sequence[int], new_tokens: int, mode: str
) -> dict[str, Any]:
    body = _body(prompt, new_tokens, mode)
    response = await client.post("/generate", json=body)
    if response.status_code != httpx.codes.OK:
        raise refusal(response.status_code, response.text, body, LENGTHS, "--url")
    reply: dict[str, Any] = response.json()
    return reply
