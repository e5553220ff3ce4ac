"""What a grammar lets come next: from a grammar's text to one mask of token ids per position.

The engine of grammars is llguidance: Rust without torch, which works out its automata while tokens
come, under fixed bounds, so that a grammar costs little to begin with and no step is ever long. A
grammar's text is its Lark dialect, alone or as a JSON document of several named ones; the API
process writes it (`server/grammars.py`) and has it tried in a process of its own
(`grammar_check.py`) before any request comes here.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..configs.sampling import SamplingParams

MAX_CACHED = 64
"""Grammars that stay compiled: clients repeat theirs."""
NO_WAY_ON = "no text fits here; a rule or a $ref may lead to nothing but itself"
"""What the library calls NoExtensionBias."""


class GrammarError(Exception):
    """A grammar that cannot be used; the text is for its sender."""


class GrammarCompiler:
    """Compiles grammars for one vocabulary; every token added to it counts as a control token.

    So a grammar meets control tokens only where it names them, whatever text they look like.
    """

    def __init__(
        self, description: dict[str, Any], vocab_size: int, eos_ids: Sequence[int]
    ) -> None:
        """description: tokenizer.json. Raises ValueError for one that llguidance cannot read."""
        added = [token | {"special": True} for token in description.get("added_tokens") or ()]
        text = json.dumps(description | {"added_tokens": added})
        try:
            # Without an EOS of its own the library would guess one by name.
            self._tokenizer = LLTokenizer(text, vocab_size, list(eos_ids) or None)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"tokenizer.json: {reason_of(error)}") from error
        self._num_bytes = -(-vocab_size // 8)
        self._eos_ids = frozenset(self._tokenizer.eos_tokens)
        self._limits = LLParserLimits(
            initial_lexer_fuel=200_000,
            step_lexer_fuel=50_000,
            step_max_items=20_000,
            max_lexer_states=20_000,
            max_grammar_size=200_000,
            verbose_errors=False,
        )
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    @classmethod
    def from_directory(
        cls, directory: str | Path, vocab_size: int, eos_ids: Sequence[int]
    ) -> "GrammarCompiler":
        """Read a checkpoint's tokenizer.json; raises ValueError where that cannot be used."""
        try:
            description = json.loads((Path(directory) / "tokenizer.json").read_bytes())
        except OSError as error:
            raise ValueError(f"tokenizer.json: {error.strerror}") from None
        return cls(description, vocab_size, eos_ids)

    def compile(self, grammar: str, params: SamplingParams) -> "Matcher":
        """A matcher at the grammar's start; raises GrammarError."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
            if compiled.is_error():
                raise GrammarError(reason_of(compiled.get_error()))
            self._compiled[grammar] = compiled
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(grammar)
        return Matcher(compiled.deep_copy(), self._num_bytes, self._eos_ids, params)


class Matcher:
    """Where one request stands in its grammar.

    A stop id is legal exactly where the grammar may end and `min_tokens` are there; where nothing
    else could follow, the grammar goes before both rules. Nothing here raises: a matcher that met
    one of its bounds has an `error`, for the end of its own request.
    """

    def __init__(
        self, matcher: LLMatcher, num_bytes: int, eos_ids: frozenset[int], params: SamplingParams
    ) -> None:
        """Use `GrammarCompiler.compile`."""
        self._matcher = matcher
        self._num_bytes = num_bytes
        self._stop_ids = frozenset(params.stop_token_ids)
        self._end_ids = eos_ids | self._stop_ids
        self._min_tokens = params.min_tokens
        self._num_accepted = 0

    @property
    def error(self) -> str | None:
        """Why this matcher cannot go on: a token that is not legal, or a bound that was met."""
        if not self._matcher.is_error():
            return None
        return f"the grammar cannot be followed further: {reason_of(self._matcher.get_error())}"

    @property
    def is_complete(self) -> bool:
        """The grammar is satisfied and admits nothing more."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def is_end(self, token_id: int) -> bool:
        """Whether an id is EOS or ends the request: it stands for no text."""
        return token_id in self._end_ids

    def mask(self) -> bytes:
        """The ids that may come next, one bit each, lowest bit first; all of them after an error.

        The same until `accept` or `rollback` is called.
        """
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            return b"\xff" * self._num_bytes
        may_end = self._matcher.is_accepting() and self._num_accepted >= self._min_tokens
        ruled = bytearray(mask)
        for token_id in self._end_ids:
            byte, bit = token_id >> 3, 1 << (token_id & 7)
            if may_end and token_id in self._stop_ids:
                ruled[byte] |= bit
            else:
                ruled[byte] &= ~bit
        return bytes(ruled) if ruled.strip(b"\0") else mask

    def accept(self, ids: Sequence[int]) -> None:
        """Take tokens that were chosen; one that is not legal puts the matcher in error."""
        if self._matcher.consume_tokens(list(ids)):
            self._num_accepted += len(ids)

    def rollback(self, count: int) -> None:
        """Forget the newest `count` tokens."""
        if count:
            self._matcher.rollback(count)
            self._num_accepted -= count

    def after(self, draft_ids: Sequence[int]) -> "Ahead":
        """What is legal behind drafts; this matcher stays where it is."""
        return Ahead(self, draft_ids)

    def mask_after(self, draft_ids: Sequence[int]) -> bytes:
        """`mask` behind drafts; all ids where one of them is not legal or ends the request.

        Nothing is chosen there: a draft that is not legal is not what its own row will choose.
        """
        count = 0
        if not self._end_ids.intersection(draft_ids):
            count = self._matcher.try_consume_tokens(list(draft_ids))
        self._num_accepted += count
        is_open = count == len(draft_ids) and not self._matcher.is_stopped()
        mask = self.mask() if is_open else b"\xff" * self._num_bytes
        self.rollback(count)
        return mask


@dataclass(frozen=True, slots=True)
class Ahead:
    """A matcher behind drafts, as one position of a verify step sees it."""

    matcher: Matcher
    draft_ids: Sequence[int]

    def mask(self) -> bytes:
        return self.matcher.mask_after(self.draft_ids)

    def after(self, draft_ids: Sequence[int]) -> "Ahead":
        return Ahead(self.matcher, [*self.draft_ids, *draft_ids])


def reason_of(error: object) -> str:
    """What a message of the library says, in one line without what it prints around that."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Of a faulty regular expression it shows the whole first, and what is wrong last.
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = ([*causes, *lines, "unknown error"])[0][:200]
    return NO_WAY_ON if reason == "NoExtensionBias" else reason
