"""The commands of `outrider chat`, which begin with a slash."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from outrider.services.clients.rest import StreamedReply
from outrider.services.terminal.conversation import OPTIONS, Conversation
from outrider.services.terminal.origins import colour_legend
from outrider.services.terminal.reasons import why_no_draft
from outrider.services.terminal.tree_text import round_tree
from outrider.shared.base.errors import InvalidRequestError

MODES = ("auto", "on", "off")
DEFAULT = "default"


class LeaveChat(Exception):
    """Raised by the command that ends the chat."""


@dataclass(slots=True)
class ChatState:
    """The state that the commands read and change: the conversation, and the answers of this session."""

    conversation: Conversation
    replies: list[StreamedReply] = field(default_factory=list)


def run_command(line: str, state: ChatState, console: Console) -> None:
    """Run a slash command of the terminal chat: one typed line that begins with ``/``.

    Raises:
        InvalidRequestError: The command is unknown, or its arguments are invalid.
        LeaveChat: The command ends the chat.
    """
    name, _, argument = line[1:].partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise InvalidRequestError(
            f"/{name} is not a command. /help lists the commands. To send text that begins with a slash, "
            "write two slashes.",
            field=f"/{name}",
        )
    command.run(state, argument.strip(), console)


def _help(state: ChatState, argument: str, console: Console) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, command in COMMANDS.items():
        table.add_row(f"/{name} {command.arguments}".rstrip(), command.help)
    console.print(table)
    console.print(
        "[dim]Enter sends. Alt+Enter or Ctrl-J starts a new line. Ctrl-C stops an answer. Ctrl-D leaves.[/]"
    )
    if console.is_terminal and not console.no_color:
        console.print(colour_legend())


def _reset(state: ChatState, argument: str, console: Console) -> None:
    state.conversation.messages.clear()
    state.conversation.last_round = None
    state.conversation.dropped_turns = 0
    console.print("[dim]The chat is empty.[/]")


def _system(state: ChatState, argument: str, console: Console) -> None:
    state.conversation.system = argument
    console.print("[dim]System prompt set.[/]" if argument else "[dim]No system prompt.[/]")


def _set(state: ChatState, argument: str, console: Console) -> None:
    conversation = state.conversation
    if argument:
        name, _, value = argument.partition(" ")
        if not value.strip():
            raise InvalidRequestError("Write /set NAME VALUE. The value `default` removes it.", field="/set")
        conversation.set_option(name, value.strip())
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name in OPTIONS:
        table.add_row(name, str(conversation.options.get(name, "[dim]default[/]")))
    table.add_row("speculation", conversation.mode or "[dim]default[/]")
    console.print(table)


def _spec(state: ChatState, argument: str, console: Console) -> None:
    if argument not in (*MODES, DEFAULT):
        allowed = ", ".join((*MODES, DEFAULT))
        raise InvalidRequestError(f"Write /spec followed by one of {allowed}.", field="/spec")
    state.conversation.mode = None if argument == DEFAULT else argument
    console.print(f"[dim]Speculation: {'default of the server' if argument == DEFAULT else argument}.[/]")


def _stats(state: ChatState, argument: str, console: Console) -> None:
    if not state.replies:
        console.print("[dim]No answer yet.[/]")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("answer", "tokens", "tokens/s", "first token", "accept length", "rounds"):
        table.add_column(title, justify="right")
    table.add_column("why a round had no draft")
    for number, reply in enumerate(state.replies, 1):
        speculation = reply.speculation
        drafted = bool(speculation.get("draft_tokens"))
        table.add_row(
            str(number),
            str(reply.completion_tokens),
            "–" if reply.stream_speed is None else f"{reply.stream_speed:.0f}",
            f"{reply.first_token_s * 1e3:.0f} ms",
            f"{speculation['accept_length']:.2f}" if drafted else "–",
            str(speculation.get("rounds", "–")),
            why_no_draft(reason) if (reason := speculation.get("fallback_reason")) else "",
        )
    console.print(table)


def _tree(state: ChatState, argument: str, console: Console) -> None:
    if state.conversation.last_round is None:
        console.print("[dim]There is no round to show. An answer of one token needs none.[/]")
    else:
        console.print(round_tree(state.conversation.last_round))


def _save(state: ChatState, argument: str, console: Console) -> None:
    path = _path(argument, "/save")
    state.conversation.save(path)
    console.print(f"[dim]Saved to {path}.[/]")


def _load(state: ChatState, argument: str, console: Console) -> None:
    state.conversation.load(_path(argument, "/load"))
    console.print(f"[dim]Loaded {len(state.conversation.messages)} messages.[/]")


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise InvalidRequestError(f"Write {command} FILE.", field=command)
    return Path(argument).expanduser()


def _quit(state: ChatState, argument: str, console: Console) -> None:
    raise LeaveChat


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its function, its arguments and its help."""

    run: Callable[[ChatState, str, Console], None]
    arguments: str
    help: str


COMMANDS: Mapping[str, Command] = {
    "help": Command(_help, "", "list the commands"),
    "reset": Command(_reset, "", "forget all messages; keep the system prompt and the options"),
    "system": Command(_system, "[TEXT]", "set the system prompt, or remove it"),
    "set": Command(_set, "[NAME VALUE]", "show the options, or set one; the value `default` removes it"),
    "spec": Command(_spec, "on|off|auto|default", "set the speculation mode; `default` is the server's"),
    "stats": Command(_stats, "", "show the numbers of all answers"),
    "tree": Command(_tree, "", "show the draft tree of the last round of the last answer"),
    "save": Command(_save, "FILE", "save the chat"),
    "load": Command(_load, "FILE", "load a saved chat"),
    "quit": Command(_quit, "", "leave; Ctrl-D does the same"),
}
