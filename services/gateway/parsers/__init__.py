"""Output parsers: they split a model's text into text, reasoning and tool calls, one file per format."""
