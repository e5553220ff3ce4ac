"""Chats as DeepSeek-V3.2 encodes them, cut into pieces that carry a loss weight.

V3.2 has no template file; its format is defined by the encoder program of the model repository. The
tools block is part of that wire format and read from the server's own file. The server's encoder
has other inputs and knows no loss weights; a test holds the two equal.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

# The server's copy: training and serving must not differ by a blank.
TOOLS_FILE = Path(__file__).parent.parent / "server" / "static" / "deepseek_v32_tools.txt"

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
DSML = "｜DSML｜"
FIM = ("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>")


@dataclass(frozen=True)
class Call:
    """One tool call; arguments keep their order."""

    name: str
    arguments: dict[str, object]


@dataclass(frozen=True)
class Turn:
    """One message. `reasoning` is used in thinking mode only, `results` makes it a tool turn."""

    role: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    results: tuple[str, ...] = ()


@dataclass
class Chat:
    """A conversation, or plain text when it has a single turn of role "text"."""

    turns: list[Turn]
    tools: list[dict[str, object]] = field(default_factory=list)
    thinking: bool = False
    # Loss weight of everything that the assistant did not write.
    context_weight: float = 0.1


Piece = tuple[str, float]


def dump(value: object) -> str:
    """JSON with Python's default spacing and unescaped text, as V3.2 writes it."""
    return json.dumps(value, ensure_ascii=False)


def tools_block(tools: list[dict[str, object]]) -> str:
    """The `## Tools` section of a system prompt."""
    head = TOOLS_FILE.read_text(encoding="utf-8")
    return head + "\n".join(dump(tool) for tool in tools) + "\n</functions>\n"


def render_calls(calls: tuple[Call, ...]) -> str:
    """The DSML block that asks for tool calls."""
    invokes = []
    for call in calls:
        lines = []
        for key, value in call.arguments.items():
            is_text = isinstance(value, str)
            head = f'<{DSML}parameter name="{key}" string="{"true" if is_text else "false"}">'
            lines.append(f"{head}{value if is_text else dump(value)}</{DSML}parameter>")
        body = "\n".join(lines)
        invokes.append(f'<{DSML}invoke name="{call.name}">\n{body}\n</{DSML}invoke>')
    joined = "\n".join(invokes)
    return f"\n\n<{DSML}function_calls>\n{joined}\n</{DSML}function_calls>"


def render_results(results: tuple[str, ...]) -> str:
    """The block of tool results that follows the calling turn."""
    lines = "\n".join(f"<result>{result}</result>" for result in results)
    return f"\n\n<function_results>\n{lines}\n</function_results>\n\n"


def pieces(chat: Chat) -> list[Piece]:
    """The document as (text, loss weight); pieces meet at special tokens only.

    The last user turn of a thinking chat opens with `<think>`, every other with `</think>`.
    """
    weight = chat.context_weight
    if chat.turns[0].role == "text":
        return [(BOS, 0.0), (chat.turns[0].text + EOS, 1.0)]
    last_user = max(i for i, turn in enumerate(chat.turns) if turn.role == "user")
    out: list[Piece] = [(BOS, 0.0)]
    if chat.tools and chat.turns[0].role != "system":
        out.append(("\n\n" + tools_block(chat.tools), weight))
    for i, turn in enumerate(chat.turns):
        thinks = chat.thinking and i >= last_user
        mark = THINK if thinks else END_THINK
        if turn.role == "system":
            block = "\n\n" + tools_block(chat.tools) if chat.tools else ""
            out.append((turn.text + block, weight))
        elif turn.role == "user":
            out.append((USER + turn.text + ASSISTANT + mark, weight))
        elif turn.role == "tool":
            out.append((render_results(turn.results) + mark, weight))
        else:
            reasoning = turn.reasoning + END_THINK if thinks else ""
            calls = render_calls(turn.calls) if turn.calls else ""
            out.append((reasoning + turn.text + calls + EOS, 1.0))
    return out


def prompt(user: str, system: str = "", thinking: bool = False) -> str:
    """The prompt of a single user message."""
    return BOS + system + USER + user + ASSISTANT + (THINK if thinking else END_THINK)
