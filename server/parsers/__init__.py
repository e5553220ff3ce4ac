"""Forward-only parsers that split a model's text into reasoning, content and tool calls."""
