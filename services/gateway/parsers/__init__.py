"""Output parsers, one file per format. They split a model's output into text, reasoning and tool calls."""
