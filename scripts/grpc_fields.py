"""Lists the gRPC field for each request field of REST, and writes this table into docs/api.md.

Most fields come from `services/gateway/options.py`. This script lists the fields that routes read themselves.
A unit test fails in three cases: a REST route accepts a field that is missing here, a gRPC field named here
does not exist, or a gRPC request has a field that is not named here. Run `python scripts/grpc_fields.py`
after a change. With ``--check``, the script only checks the page.
"""

from __future__ import annotations

import sys
from pathlib import Path

from outrider.services.gateway.options import OPTIONS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
BEGIN, END = "<!-- gRPC fields: begin -->\n", "<!-- gRPC fields: end -->"

SHARED: dict[str, str] = {
    **{name: f"options.{option.grpc}" for option in OPTIONS for name in option.rest},
    "return_hidden_states": "options.states.hidden_states",
    "return_routed_experts": "options.states.routed_experts",
    "routed_experts_start_len": "options.states.start",
    "token_ids_logprob": "options.logprobs.token_ids",
    "logprob_start_len": "options.logprobs.prompt_start",
    "logprobs": "options.logprobs.top",
    "model": "model",
    "prompt_logprobs": "options.logprobs.prompt_top",
    "request_id": "options.rid",
    "return_logprob": "options.logprobs.top",
    "rid": "options.rid",
    "speculation": "options.speculation",
    "top_logprobs": "options.logprobs.top",
    "top_logprobs_num": "options.logprobs.top",
    "truncate_prompt_tokens": "options.truncate_prompt_tokens",
    "ebnf": "options.constraint",
    "guided_choice": "options.constraint",
    "guided_grammar": "options.constraint",
    "guided_json": "options.constraint",
    "guided_regex": "options.constraint",
    "json_schema": "options.constraint",
    "regex": "options.constraint",
    "response_format": "options.constraint",
    "structured_outputs": "options.constraint",
}
"""Fields that several routes share."""
CHAT = {
    **SHARED,
    "add_generation_prompt": "prompt.add_generation_prompt",
    "add_special_tokens": "prompt.add_special_tokens",
    "chat_template_kwargs": "prompt.template_kwargs",
    "continue_final_message": "prompt.continue_final_message",
    "include_reasoning": "omit_reasoning",
    "messages": "messages",
    "parallel_tool_calls": "parallel_tool_calls",
    "reasoning_effort": "prompt.reasoning_effort",
    "separate_reasoning": "join_reasoning",
    "tool_choice": "tool_choice",
    "tools": "tools",
}
COMPLETE = {
    **SHARED,
    "add_special_tokens": "add_special_tokens",
    "input_ids": "token_ids",
    "prompt": "text",
    "sampling_params": "options.sampling",
    "text": "text",
}
NOT_NEEDED = {
    "best_of": "`best_of` is not available in streams, and every reply of gRPC is a stream",
    "echo": "the client already has the prompt",
    "return_text_in_logprobs": "`Detokenize` returns the text of each token id",
    "return_token_ids": "token ids are always returned",
    "return_tokens_as_token_ids": "logprobs always have token ids",
    "stream": "every reply is a stream",
    "stream_options": "`Finished` always contains the usage",
}
"""Fields of REST that gRPC does not need, and the reason for each field."""
GRPC_ONLY = {
    "options.sampling.bad_words": "like `bad_words`, but as token ids",
    "options.sampling.choice_index": "set by the server",
}
"""Fields of gRPC that REST does not have, and a description of each field."""


def table() -> str:
    """Return the table as Markdown. The last row lists the fields that have the same name in both APIs."""
    rows = ["| REST | gRPC |", "| --- | --- |"]
    same, renamed = set(), {}
    for names in (CHAT, COMPLETE):
        for name, path in names.items():
            if path.rsplit(".", 1)[-1] == name:
                same.add(path)
            else:
                renamed.setdefault(path, set()).add(name)
    for path, rest in sorted(renamed.items()):
        rows.append(f"| {', '.join(f'`{name}`' for name in sorted(rest))} | `{path}` |")
    for name, reason in sorted(NOT_NEEDED.items()):
        rows.append(f"| `{name}` | no field: {reason} |")
    for path, reason in sorted(GRPC_ONLY.items()):
        rows.append(f"| no field | `{path}`: {reason} |")
    rows.append(f"| fields of the same name | {', '.join(f'`{path}`' for path in sorted(same))} |")
    return "\n".join(rows) + "\n"


def main(arguments: list[str]) -> int:
    """Write the table into the page. With ``--check``, only return 1 if the page's table is out of date."""
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = before + BEGIN + "\n" + table() + "\n" + END + after
    if "--check" in arguments:
        return int(made != page)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
