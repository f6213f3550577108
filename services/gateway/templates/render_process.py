"""The process that renders a model's chat template: ``python -m …render_process``.

The process reads requests and writes replies, each as one line of JSON. The first request contains the
template. A template that needs too much memory or time ends this process instead of the gateway.
"""

from __future__ import annotations

import json
import signal
import sys

from outrider.services.gateway.templates.chat_template import ChatTemplate
from outrider.services.gateway.templates.render_lines import reply_line
from outrider.shared.base.errors import OutriderError
from outrider.shared.base.line_process import limit_memory

MEMORY_BYTES = 512 << 20
"""Memory for compiling and rendering, in addition to the memory of the loaded libraries."""


def main() -> None:
    """Reply to requests until the input ends."""
    # The gateway still needs this process while it drains after such a signal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    limit_memory(MEMORY_BYTES)
    # The libraries are loaded.
    _reply("", "")
    source, special_tokens = json.loads(sys.stdin.buffer.readline())
    try:
        template = ChatTemplate(source, special_tokens)
    except OutriderError as error:
        _reply("", error.message)
        return
    _reply("", "")
    for line in sys.stdin.buffer:
        messages, options, generate = json.loads(line)
        try:
            text = template.render(messages, options, generate)
        except OutriderError as error:
            _reply("", error.message)
        else:
            _reply(text, "")


def _reply(text: str, error: str) -> None:
    sys.stdout.buffer.write(reply_line(text, error))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
