"""Messages reach every kind of chat template in the form that it expects."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.services.gateway.schemas.chat_messages import Message
from outrider.services.gateway.schemas.tools import Tool, template_tools
from outrider.services.gateway.templates.chat_template import ChatTemplate

CALL = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "Hm.",
    "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
    ],
}


def shown(message: dict[str, Any], template: str) -> str:
    made = Message.model_validate(message).for_template("messages.0")
    return ChatTemplate("{% for message in messages %}" + template + "{% endfor %}", {}).render([made], {})


@pytest.mark.parametrize(
    "template",
    [
        "{% for call in message.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}",
        "{% for call in message.tool_calls %}{{ call.function.arguments }}{% endfor %}",
        "{% for call in message.tool_calls %}{{ '' + call['function']['arguments'] + '' }}{% endfor %}",
        "{% for call in message.tool_calls %}{{ '' ~ call.function.arguments }}{% endfor %}",
    ],
)
def test_templates_print_arguments_as_json_or_append_them_to_text(template: str) -> None:
    assert shown(CALL, template) == '{"x": [1, "é"]}'


def test_templates_can_read_single_arguments() -> None:
    template = "{% for k, v in message.tool_calls[0].function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
    assert shown(CALL, template) == "x=[1, 'é']"


def test_reasoning_has_the_names_of_all_templates() -> None:
    assert (
        shown(CALL, "{{ message.reasoning_content }}{{ message.thinking }}{{ message.content }}") == "Hm.Hm."
    )
    both = {**CALL, "content": "Text."}
    assert shown(both, "{{ message.thinking is defined }}") == "False"


@pytest.mark.parametrize(
    ("role", "expected"),
    [("developer", "system"), ("function", "tool"), ("tool", "tool"), ("user", "user")],
)
def test_roles_that_templates_do_not_know_are_renamed(role: str, expected: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert shown({"role": role, "content": parts}, "{{ message.role }}:{{ message.content }}") == (
        f"{expected}:a\nb"
    )


def test_tools_have_the_canonical_order_and_no_other_fields() -> None:
    tool = Tool.model_validate(
        {"function": {"strict": True, "parameters": {"b": 1, "a": 2}, "name": "f"}, "type": "function"}
    )
    (made,) = template_tools([tool])
    assert list(made) == ["type", "function"]
    assert list(made["function"].items()) == [("name", "f"), ("parameters", {"b": 1, "a": 2})]
    assert tool.ignored_fields("tools.0.") == ["tools.0.function.strict"]
