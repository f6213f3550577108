"""The loop of `outrider chat`: reads a line, runs a command or sends a message, and prints the answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from outrider.services.clients.rest import RestClient, StreamedReply
from outrider.services.clients.summary import speculation_summary
from outrider.services.terminal.context_room import CONTEXT_FULL, ContextRoom
from outrider.services.terminal.conversation import Conversation
from outrider.services.terminal.keys import hidden_control_keys
from outrider.services.terminal.origins import OriginColours
from outrider.services.terminal.slash_commands import COMMANDS, ChatState, LeaveChat, run_command
from outrider.services.terminal.wrapped import WrappedPrinter
from outrider.shared.base.errors import OutriderError

ANSWER_LIMITS = ("max_tokens", "max_new_tokens")


class Chat:
    """One terminal chat with a running gateway.

    Args:
        client: The gateway's client.
        conversation: Options and messages at the start of the chat.
        console: Console on which answers are printed.
        notes: Console on which notes and statistics are printed.
    """

    def __init__(
        self, client: RestClient, conversation: Conversation, console: Console, notes: Console
    ) -> None:
        self._client = client
        self._room = ContextRoom(client)
        self._state = ChatState(conversation)
        self._console = console
        self._notes = notes

    def run(self, lines: Iterator[str]) -> None:
        """Handle lines until they end, or until a command ends the chat."""
        for line in lines:
            text = line.strip()
            try:
                if text.startswith("/") and not text.startswith("//"):
                    run_command(text, self._state, self._console)
                elif text:
                    self._send(text[1:] if text.startswith("//") else text)
            except LeaveChat:
                return
            except OutriderError as error:
                self._notes.print(Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True)

    def _send(self, text: str) -> None:
        conversation = self._state.conversation
        conversation.messages.append({"role": "user", "content": text})
        reply = StreamedReply()
        try:
            with hidden_control_keys():
                self._answer(reply)
        except KeyboardInterrupt:
            if not reply.text:
                self._notes.print("[dim]stopped[/]")
        except OutriderError:
            if not reply.text:
                conversation.messages.pop()
            raise
        finally:
            if reply.text:
                conversation.messages.append({"role": "assistant", "content": reply.text})
                self._state.replies.append(reply)
        if reply.finish_reason is None and not reply.text:
            conversation.messages.pop()
        else:
            print_summary(reply, self._notes)

    def _answer(self, reply: StreamedReply) -> None:
        """Stream an answer. If the context is full, limit the answer, or drop the oldest turns.

        The turns are dropped from a copy. The conversation changes only once the server has begun to answer,
        so a message that is too long by itself leaves the conversation as it was.
        """
        conversation = self._state.conversation
        shorter = replace(conversation, messages=list(conversation.messages))
        limit = self._room.fit(shorter)
        without_limit = False

        def begun() -> None:
            dropped = shorter.dropped_turns - conversation.dropped_turns
            if dropped:
                turns = "the oldest turn" if dropped == 1 else f"the {dropped} oldest turns"
                total = shorter.dropped_turns
                self._notes.print(f"[dim]The context is full: dropped {turns} ({total} so far).[/]")
            conversation.messages[:] = shorter.messages
            conversation.dropped_turns = shorter.dropped_turns
            conversation.last_round = None
            if without_limit:
                self._notes.print("[dim]The context is almost full: the answer may be cut short.[/]")
            elif limit is not None:
                wanted = conversation.options["max_tokens"]
                self._notes.print(
                    f"[dim]The context has room for {limit} new tokens, fewer than max_tokens={wanted}: the "
                    "answer may be cut short.[/]",
                    soft_wrap=True,
                )

        while True:
            messages, options = shorter.request(trace=True)
            if limit is not None:
                options["max_tokens"] = limit
            if without_limit:
                options.pop("max_tokens", None)
            try:
                self._stream(messages, options, reply, begun)
                return
            except OutriderError as error:
                # A gateway that cannot count tokens, or whose KV cache is smaller than the context.
                if error.reason != CONTEXT_FULL:
                    raise
                if error.field in ANSWER_LIMITS and not without_limit:
                    without_limit = True
                elif not shorter.drop_oldest_turn():
                    raise

    def _stream(
        self,
        messages: list[dict[str, str]],
        options: dict[str, object],
        reply: StreamedReply,
        begun: Callable[[], None],
    ) -> None:
        """Print an answer as it arrives. Before the first piece is printed, `begun` is called."""
        has_begun = False
        printer = WrappedPrinter(self._console) if self._console.is_terminal else None
        colours = OriginColours()
        try:
            with closing(self._client.stream_chat_events(messages, options, reply)) as events:
                for piece, trace in events:
                    if not has_begun:
                        has_begun = True
                        begun()
                    if trace is not None:
                        self._state.conversation.last_round = trace
                    for part, style in colours.pieces(piece, trace):
                        if printer:
                            printer.add(part, style)
                        else:
                            self._console.file.write(part)
            if not has_begun:
                begun()
        finally:
            if printer and reply.text:
                printer.finish()
            elif reply.text:
                self._console.file.write("\n")


def run_chat(client: RestClient, conversation: Conversation) -> None:
    """Chat on the terminal, or answer the lines of standard input.

    Raises:
        UnavailableError: No server answers.
        OutriderError: The gateway refuses the API key, or serves no model.
    """
    console = Console(highlight=False, soft_wrap=True)
    notes = Console(stderr=True, highlight=False)
    chat = Chat(client, conversation, console, notes)
    # Ask for the model first, so that a wrong address is reported even if there is nothing to send.
    model = client.model
    if not sys.stdin.isatty():
        from outrider.services.terminal.line_editor import piped_lines

        chat.run(piped_lines())
        return
    from outrider.services.terminal.line_editor import typed_lines

    notes.print(f"[dim]{model} at {client.url}. /help lists the commands, Ctrl-D leaves.[/]")
    chat.run(typed_lines([f"/{name}" for name in COMMANDS]))


def print_summary(reply: StreamedReply, console: Console) -> None:
    """Print the numbers of one answer on one line, and why the answer ended."""
    speed = reply.stream_speed
    shown = "" if speed is None else f"; {speed:.0f} tokens/s after the first token"
    console.print(
        f"[dim]{speculation_summary(reply)}{shown}; {reply.finish_reason or 'stopped'}[/]", soft_wrap=True
    )
