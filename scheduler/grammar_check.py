"""Tries grammars in a process of its own, which may die of one: `python -m` this module.

A schema or a regular expression comes from a client, and no bound inside the library is as good as
the end of a process: this one gives itself a few seconds of processor time a question and bounded
memory, so a grammar that hangs or crashes the library ends here and never reaches the engine.
Beyond compiling it walks a few tokens into the grammar, since much is worked out only then.

One question and one answer a line, as JSON: `Question` in, `Verdict` out, after one `Verdict` that
says whether the vocabulary can be used at all. The end of the input ends the process.
"""

import contextlib
import random
import resource
import signal
import sys
import time

import msgspec
from llguidance.gbnf_to_lark import gbnf_to_lark

from ..configs.sampling import SamplingParams
from .grammar import GrammarCompiler, GrammarError, Matcher, reason_of

CPU_SECONDS = 3
MEMORY_BYTES = 4 << 30
COMPILE_SECONDS = 0.5
"""Processor time; the engine compiles the same grammar between two steps."""
NUM_STEPS = 24


class Question(msgspec.Struct):
    """A grammar to try. `is_ebnf`: it is in GBNF notation and to be translated first."""

    grammar: str
    is_ebnf: bool = False


class Verdict(msgspec.Struct):
    """What is wrong with a grammar, or nothing; `grammar` is the translation asked for."""

    error: str | None = None
    grammar: str = ""


def answer(compiler: GrammarCompiler, question: Question) -> Verdict:
    """Try one grammar; raises nothing."""
    try:
        grammar = _translate(question.grammar) if question.is_ebnf else question.grammar
        _walk(_compile(compiler, grammar))
    except GrammarError as error:
        return Verdict(str(error))
    return Verdict(grammar=grammar if question.is_ebnf else "")


def _translate(ebnf: str) -> str:
    try:
        return gbnf_to_lark(ebnf)
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    except Exception as error:  # the library raises bare Exception
        raise GrammarError(reason_of(error)) from None


def _compile(compiler: GrammarCompiler, grammar: str) -> Matcher:
    before = time.process_time()
    matcher = compiler.compile(grammar, SamplingParams(max_tokens=1, seed=0))
    if time.process_time() - before > COMPILE_SECONDS:
        raise GrammarError("it is too large: it takes too long to compile")
    return matcher


def _walk(matcher: Matcher) -> None:
    draws = random.Random(0)
    for step in range(NUM_STEPS):
        mask = matcher.mask()
        if matcher.error is not None:
            raise GrammarError(matcher.error)
        token_id = _draw(mask, draws)
        matcher.accept([token_id])
        if matcher.is_complete:
            if step == 0 and matcher.is_end(token_id):
                raise GrammarError("it admits no text")
            return


def _draw(mask: bytes, draws: random.Random) -> int:
    """One of the ids in a mask."""
    filled = [index for index, byte in enumerate(mask) if byte]
    index = draws.choice(filled)
    return index * 8 + draws.choice([bit for bit in range(8) if mask[index] >> bit & 1])


def _limit_processor() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def _limit_memory() -> None:
    # Where a system does not know one of them, the other bounds are enough.
    for kind, size in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (size, size))


def _say(verdict: Verdict) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
    sys.stdout.buffer.flush()


def main(directory: str, vocab_size: int, eos_ids: list[int]) -> None:
    """Answer questions until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # how the server ends is not for its group to decide
    _limit_memory()
    try:
        compiler = GrammarCompiler.from_directory(directory, vocab_size, eos_ids)
    except ValueError as error:
        _say(Verdict(str(error)))
        return
    _say(Verdict())
    decoder = msgspec.json.Decoder(Question)
    for line in sys.stdin.buffer:
        _limit_processor()
        _say(answer(compiler, decoder.decode(line)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=list[int]))
