"""The pieces of a grammar's text, in the Lark dialect of the grammar engine.

Control tokens are met by id, and nowhere but where a grammar names them: text that looks like one
is made of other tokens.
"""

import json
from typing import Any

ANY_TEXT = "(?s:.*)"


def token(token_id: int) -> str:
    """Exactly this token."""
    return f"<[{token_id}]>"


def literal(text: str) -> str:
    """Exactly this text; empty text is nothing."""
    quoted = json.dumps(text, ensure_ascii=False)
    # Of JSON's escapes the dialect lacks the numeric ones.
    return regex(escaped(text)) if "\\u" in quoted else quoted


def regex(pattern: str) -> str:
    """A text that the pattern matches as a whole; `pattern` holds no bare slash."""
    return f"/{pattern}/"


def escaped(text: str) -> str:
    """A pattern of exactly this text."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def text_without(text: str) -> str:
    """Any text, also none, that does not hold `text`."""
    return f"{regex(ANY_TEXT)} & ~{regex(ANY_TEXT + escaped(text) + ANY_TEXT)}"


def json_text(schema: dict[str, Any], **layout: Any) -> str:
    """JSON text of a schema; `layout` says how it may be written (x-guidance)."""
    return f"%json {json.dumps(schema | {'x-guidance': layout})}"


def grammars(start: str, **parts: str) -> str:
    """One grammar of several: `start` refers to a part as `@name`."""
    named = [{"name": name, "lark_grammar": text} for name, text in parts.items()]
    return json.dumps({"grammars": [{"lark_grammar": start}, *named]})
