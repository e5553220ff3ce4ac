"""DeepSeek-V3.2's prompt format: messages to runs.

The model has no Jinja template; its prompt is defined by a small program in the model repository.
This is our own statement of that format, byte-exact with the published fixtures. It is a pure
function of messages that are already in order; what the request layer does first (tools put in
place, results sorted) is chat_request.py. Everything a client sends lands in text runs.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from .chat_messages import InvalidMessagesError, Message, ToolCall
from .prompt_runs import Control, Run, RunWriter

BOS = Control("<｜begin▁of▁sentence｜>")
EOS = Control("<｜end▁of▁sentence｜>")
USER = Control("<｜User｜>")
ASSISTANT = Control("<｜Assistant｜>")
THINK = Control("<think>")
END_THINK = Control("</think>")
DSML = Control("｜DSML｜")

_TOOLS_FILE = Path(__file__).with_name("static") / "deepseek_v32_tools.txt"
TOOLS_BLOCK = _TOOLS_FILE.read_text(encoding="utf-8")
RESPONSE_FORMAT = (
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
)
_MARKERS = re.compile("(｜DSML｜|</?think>)")


def encode_messages(messages: Sequence[Message], thinking: bool) -> list[Run]:
    """The prompt of a chat, with nothing appended after the last message.

    Tool results stand in the order of their calls, and `arguments` are JSON objects. Raises
    InvalidMessagesError where the format cannot carry a message. In thinking mode developer
    messages before the last user turn vanish, as in the published program.
    """
    return _Encoder(messages, thinking).encode()


def start_marker(runs: Sequence[Run]) -> Literal["reasoning", "content"]:
    """What the model writes first: decided by the last think marker of the prompt, not by text."""
    for run in reversed(runs):
        if run in (THINK, END_THINK):
            return "reasoning" if run == THINK else "content"
    return "content"


def last_turn_index(messages: Sequence[Message]) -> int:
    """Index of the last user or developer message, -1 if there is none."""
    roles = [message.role for message in messages]
    return max((i for i, role in enumerate(roles) if role in ("user", "developer")), default=-1)


def to_json(value: Any) -> str:
    """JSON as the model saw it in training: default spacing, non-ASCII kept, key order kept."""
    return json.dumps(value, ensure_ascii=False)


class _Encoder:
    """One pass over the messages; `_results_left` counts down the results of a tool turn."""

    def __init__(self, messages: Sequence[Message], thinking: bool) -> None:
        self._messages = messages
        self._thinking = thinking
        self._last_turn = last_turn_index(messages)
        self._results_left = 0
        self._num_results = 0
        self._out = RunWriter()

    def encode(self) -> list[Run]:
        self._out.write(BOS)
        for index, message in enumerate(self._messages):
            match message.role:
                case "system":
                    self._out.write(message.content or "")
                    self._extras(message)
                case "user":
                    self._turn(index, message)
                case "developer":
                    self._developer(index, message)
                case "assistant":
                    self._assistant(index, message)
                case "tool":
                    self._result(index, message)
        return self._out.runs()

    def _extras(self, message: Message) -> None:
        if message.tools:
            self._out.write("\n\n", *tools_runs(message.tools))
        if message.response_schema:
            self._out.write("\n\n", RESPONSE_FORMAT, to_json(message.response_schema))

    def _turn(self, index: int, message: Message) -> None:
        self._out.write(USER, message.content or "", ASSISTANT)
        self._out.write(self._marker(index == self._last_turn))

    def _developer(self, index: int, message: Message) -> None:
        if not message.content:
            raise InvalidMessagesError(
                f"messages.{index}.content", "a developer message needs content"
            )
        if self._thinking and index < self._last_turn:
            return
        self._out.write(USER)
        self._extras(message)
        self._out.write("\n\n# The user's message is: ", message.content, ASSISTANT)
        self._out.write(self._marker(index == self._last_turn))

    def _assistant(self, index: int, message: Message) -> None:
        if self._thinking and index > self._last_turn:
            self._out.write(message.reasoning or "")
            if message.prefix and not message.content:
                return
            self._out.write(END_THINK)
        self._out.write(message.content or "")
        if message.tool_calls:
            self._calls(index, message.tool_calls)
        self._results_left, self._num_results = len(message.tool_calls), 0
        if not message.prefix:
            self._out.write(EOS)

    def _calls(self, index: int, calls: Sequence[ToolCall]) -> None:
        self._out.write("\n\n<", DSML, "function_calls>\n")
        for number, call in enumerate(calls):
            path = f"messages.{index}.tool_calls.{number}.function.arguments"
            parameters = parse_arguments(call.arguments, path)
            self._out.write("<", DSML, f'invoke name="{call.name}">\n')
            for position, (key, value) in enumerate(parameters.items()):
                is_text = isinstance(value, str)
                self._out.write("\n" if position else "", "<", DSML)
                self._out.write(f'parameter name="{key}" string="{str(is_text).lower()}">')
                self._out.write(value if is_text else to_json(value), "</", DSML, "parameter>")
            self._out.write("\n</", DSML, "invoke>\n")
        self._out.write("</", DSML, "function_calls>")

    def _result(self, index: int, message: Message) -> None:
        if not self._results_left:
            raise InvalidMessagesError(
                f"messages.{index}",
                "a message with role 'tool' must be a response to a preceding message with "
                "'tool_calls'",
            )
        if not self._num_results:
            self._out.write("\n\n<function_results>")
        self._num_results += 1
        self._results_left -= 1
        self._out.write("\n<result>", message.content or "", "</result>")
        if not self._results_left:
            self._out.write("\n</function_results>\n\n")
            self._out.write(self._marker(index >= self._last_turn))

    def _marker(self, is_current: bool) -> Control:
        return THINK if self._thinking and is_current else END_THINK


def tools_runs(tools: Sequence[dict[str, Any]]) -> list[Run]:
    """The block that lists the tools; its markers are control tokens, the schemas are text."""
    parts = _MARKERS.split(TOOLS_BLOCK)
    fixed: list[Run] = [Control(p) if _MARKERS.fullmatch(p) else p for p in parts]
    return [*fixed, "".join(to_json(tool["function"]) + "\n" for tool in tools), "</functions>\n"]


def parse_arguments(text: str, path: str) -> dict[str, Any]:
    """The arguments of a call in the history; empty text counts as no arguments.

    Raises InvalidMessagesError unless it is the JSON of an object with finite numbers.
    """
    try:
        value = json.loads(text, parse_constant=_refuse) if text else {}
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        raise InvalidMessagesError(path, "arguments must be the JSON text of an object") from None
    if not isinstance(value, dict):
        raise InvalidMessagesError(path, "arguments must be a JSON object")
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
