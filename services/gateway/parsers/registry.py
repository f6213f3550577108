"""Lists all parsers, selects the parsers for a model, and creates the parser of each answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider.services.gateway.parsers.deepseek_v3 import DeepSeekV3Parser
from outrider.services.gateway.parsers.forced_answer import ForcedCallParser
from outrider.services.gateway.parsers.harmony import HarmonyParser
from outrider.services.gateway.parsers.hermes import HermesParser
from outrider.services.gateway.parsers.llama3_json import Llama3JsonParser
from outrider.services.gateway.parsers.mistral import ID_CHARS, MistralParser
from outrider.services.gateway.parsers.pieces import OutputParser, ToolOptions
from outrider.services.gateway.parsers.plain import PlainParser
from outrider.services.gateway.parsers.pythonic import PythonicParser
from outrider.services.gateway.parsers.think import BRACKETS, THINK, ThinkParser

AUTO, NONE, HARMONY, MISTRAL = "auto", "none", "harmony", "mistral"
TOOL_PARSERS: dict[str, Callable[[ToolOptions], OutputParser]] = {
    "deepseek-v3": DeepSeekV3Parser,
    HARMONY: HarmonyParser,
    "hermes": HermesParser,
    "llama3-json": Llama3JsonParser,
    MISTRAL: MistralParser,
    "pythonic": PythonicParser,
}
REASONING_TAGS = {"think": THINK, "think-open": THINK, MISTRAL: BRACKETS}
"""The tags of each reasoning parser. With ``think-open``, every answer begins inside the reasoning, without a
tag."""

_WITH_SPECIAL_TOKENS = frozenset(["deepseek-v3", "llama3-json", MISTRAL, "pythonic"])
HARMONY_ANSWER = "<|channel|>final<|message|>"
"""Text after which the answer begins in the harmony format."""
TOOL_NAMES = (AUTO, NONE, *TOOL_PARSERS)
REASONING_NAMES = (AUTO, NONE, HARMONY, *REASONING_TAGS)

# Pairs of a text in a chat template and the parser for models with such a template. The first match wins.
_TOOLS_OF_TEMPLATE = (
    ("<|channel|>", HARMONY),
    ("<｜tool▁calls▁begin｜>", "deepseek-v3"),
    ("[TOOL_CALLS]", MISTRAL),
    # Qwen3-Coder and GLM write calls as XML, which none of these parsers can read.
    ("<function=", NONE),
    ("<arg_key>", NONE),
    ("<tool_call>", "hermes"),
    ("[func_name1(", "pythonic"),
    ("<|python_start|>", "pythonic"),
    ('{"name": function name, "parameters"', "llama3-json"),
)
_REASONING_OF_TEMPLATE = (("<|channel|>", HARMONY), ("</think>", "think"), ("[/THINK]", MISTRAL))


@dataclass(frozen=True, slots=True)
class ParserNames:
    """The names of the output parsers for one model.

    Attributes:
        tools: Parser of tool calls: a key of `TOOL_PARSERS`, or ``none``.
        reasoning: Parser of the reasoning: a key of `REASONING_TAGS`, ``harmony`` or ``none``.
    """

    tools: str = NONE
    reasoning: str = NONE

    @classmethod
    def choose(cls, tools: str, reasoning: str, template: str) -> ParserNames:
        """Return the parsers that the settings name; for ``auto``, choose a parser by the chat template."""
        if tools == AUTO:
            tools = next((name for text, name in _TOOLS_OF_TEMPLATE if text in template), NONE)
        if reasoning == AUTO:
            reasoning = next((name for text, name in _REASONING_OF_TEMPLATE if text in template), NONE)
        return cls(tools, reasoning)

    def needs_special_tokens(self, with_tools: bool) -> bool:
        """Return whether the parsers need the text of special tokens, which answers normally omit."""
        if HARMONY in (self.tools, self.reasoning) or self.reasoning == MISTRAL:
            return True
        return with_tools and self.tools in _WITH_SPECIAL_TOKENS

    def markers(self, split_reasoning: bool, *, calls: bool) -> tuple[str, str]:
        """Return where a constraint begins to apply within an answer.

        Args:
            split_reasoning: Whether the reply contains the reasoning apart from the text. The reasoning is
                then not constrained.
            calls: Whether the constraint covers tool calls. In the harmony format, such a constraint covers
                the reasoning too.

        Returns:
            The values of `begins_after` and `opening` for the `Constraint`.
        """
        if HARMONY in (self.tools, self.reasoning):
            return "" if calls else HARMONY_ANSWER, ""
        tags = REASONING_TAGS.get(self.reasoning) if split_reasoning else None
        if tags is None:
            return "", ""
        return tags[1], "" if self.reasoning == "think-open" else tags[0]

    def create(
        self, options: ToolOptions | None, split_reasoning: bool, prompt_end: str
    ) -> OutputParser | None:
        """Return the output parser of one answer, or None if the whole answer is text.

        Args:
            options: The tools that the answer may call. None if the request has no tools.
            split_reasoning: Whether the reply contains the reasoning apart from the text.
            prompt_end: The last characters of the prompt, which may contain the opening tag of the reasoning.
        """
        if HARMONY in (self.tools, self.reasoning):
            options = options or ToolOptions()
            harmony = HarmonyParser(options)
            return ForcedCallParser(options, harmony, may_reason=True) if options.forced else harmony
        answer: OutputParser = PlainParser()
        if options is not None and self.tools in TOOL_PARSERS:
            if self.tools == MISTRAL:
                options = replace(options, id_chars=ID_CHARS)
            answer = TOOL_PARSERS[self.tools](options)
            if options.forced:
                answer = ForcedCallParser(options, answer, may_reason=False)
        tags = REASONING_TAGS.get(self.reasoning) if split_reasoning else None
        if tags is not None:
            inside = self.reasoning == "think-open" or prompt_end.rstrip().endswith(tags[0])
            return ThinkParser(tags, inside, answer)
        return None if isinstance(answer, PlainParser) else answer
