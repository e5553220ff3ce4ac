"""The process that tries grammars before a request is queued, as the server sees it.

A grammar comes from a client, so it may be built to hang or crash what compiles it. The process
(`scheduler/grammar_check.py`) ends itself then; here that is one more refusal, and the next grammar
gets a new process. Verdicts are remembered, as clients repeat their grammars.
"""

import asyncio
import logging
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from .errors import ApiError, internal

MAX_VERDICTS = 256
ANSWER_SECONDS = 60.0
"""A last resort on a machine that is busy: the process bounds its own processor time."""
MAX_LINE = 1 << 24
TOO_COMPLEX = "it takes too long or too much memory to compile"

_log = logging.getLogger(__name__)


class GrammarRefused(Exception):
    """A grammar that cannot be used; the text says why, for its sender."""


class _Verdict(msgspec.Struct):
    error: str | None = None
    grammar: str = ""


class GrammarTrials:
    """Tries grammars for one vocabulary, one after the other; the process starts with the first."""

    def __init__(self, directory: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._arguments = (str(directory), str(vocab_size), msgspec.json.encode(eos_ids).decode())
        self._verdicts: OrderedDict[tuple[str, bool], _Verdict] = OrderedDict()
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def check(self, grammar: str) -> None:
        """Raise GrammarRefused unless the engine can follow this grammar."""
        await self._verdict(grammar, is_ebnf=False)

    async def translate(self, ebnf: str) -> str:
        """A grammar in GBNF notation as one in Lark notation; raises GrammarRefused."""
        return (await self._verdict(ebnf, is_ebnf=True)).grammar

    async def close(self) -> None:
        """End the process; safe to call again."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            # Reads what is left, so that the pipes close with the process.
            await process.communicate()

    async def _verdict(self, grammar: str, is_ebnf: bool) -> _Verdict:
        key = grammar, is_ebnf
        async with self._turn:
            verdict = self._verdicts.get(key)
            if verdict is None:
                verdict = self._verdicts[key] = await self._ask(grammar, is_ebnf)
                if len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
            else:
                self._verdicts.move_to_end(key)
        if verdict.error is not None:
            raise GrammarRefused(verdict.error)
        return verdict

    async def _ask(self, grammar: str, is_ebnf: bool) -> _Verdict:
        try:
            process = self._process or await self._start()
            question = msgspec.json.encode({"grammar": grammar, "is_ebnf": is_ebnf})
            verdict = await _exchange(process, question + b"\n")
        except BaseException:
            # An answer may still be on its way, which would be taken for that to the next question.
            await asyncio.shield(self.close())
            raise
        if verdict is None:
            await self.close()
            return _Verdict(TOO_COMPLEX)
        return verdict

    async def _start(self) -> asyncio.subprocess.Process:
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "minidsa.scheduler.grammar_check", *self._arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE,
        )
        hello = await _exchange(process, b"")
        if hello is None:
            _log.error("the process that tries grammars cannot start")
            raise internal()
        if hello.error is not None:
            text = f"structured output does not work with this model: {hello.error}"
            raise ApiError(400, text, code="unsupported_parameter")
        return process


async def _exchange(process: asyncio.subprocess.Process, line: bytes) -> _Verdict | None:
    """Say a line and hear one; None where the process ended or never answers."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process was started without pipes")
    try:
        process.stdin.write(line)
        await process.stdin.drain()
        heard = await asyncio.wait_for(process.stdout.readline(), ANSWER_SECONDS)
    except (TimeoutError, ConnectionError):
        return None
    return msgspec.json.decode(heard, type=_Verdict) if heard.endswith(b"\n") else None
