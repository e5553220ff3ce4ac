"""Text while tokens arrive: never a torn character, and in the end exactly the full decode.

A character may span several tokens. Its bytes are held back until it is whole; what is left at the
end is flushed as the full decode would show it (U+FFFD). Byte-level tokenizers, which all supported
families use, go through the standard library's incremental UTF-8 decoder: linear time even over
endless invalid bytes, where the tokenizers library's DecodeStream holds back everything. Other
tokenizers go through DecodeStream.
"""

import codecs
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from .tokenizer import Tokenizer


class TokenDecoder(Protocol):
    """Turns one token after the other into text."""

    def step(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class Detokenizer:
    """The text of one output, token by token.

    `prompt_tail` is the end of the prompt (a handful of ids is enough): an output that completes a
    character or a word the prompt began is shown right. Special tokens are left out where asked,
    but for those in `keep`, which a parser still has to see. `token_ends[i]` is the number of
    characters shown once token i was pushed, so a place in the text finds its token again.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tail: Sequence[int] = (),
        skip_special_tokens: bool = False,
        keep: Collection[int] = (),
    ) -> None:
        self._hidden = tokenizer.special_ids.difference(keep) if skip_special_tokens else ()
        tail = [token_id for token_id in prompt_tail if token_id not in self._hidden]
        decoder = ByteDecoder if tokenizer.is_byte_level else StreamDecoder
        self._decoder: TokenDecoder = decoder(tokenizer, tail)
        self.token_ends: list[int] = []
        self._num_characters = 0

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        texts = []
        for token_id in ids:
            text = "" if token_id in self._hidden else self._decoder.step(token_id)
            self._num_characters += len(text)
            self.token_ends.append(self._num_characters)
            texts.append(text)
        return "".join(texts)

    def flush(self) -> str:
        """What was still held back; counted to the last token. Nothing is pushed after it."""
        if not self.token_ends:
            return ""
        text = self._decoder.flush()
        self._num_characters += len(text)
        self.token_ends[-1] = self._num_characters
        return text

    def tokens_through(self, num_characters: int) -> int:
        """How many tokens it took to show the first `num_characters` of the text.

        Ids, logprobs and usage end with that token when the text is cut there.
        """
        if num_characters <= 0:
            return 0
        return min(bisect_left(self.token_ends, num_characters) + 1, len(self.token_ends))


class ByteDecoder:
    """For byte-level tokenizers, whose text is the concatenation of their tokens' bytes."""

    def __init__(self, tokenizer: Tokenizer, tail: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in tail:
            self.step(token_id)

    def step(self, token_id: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class StreamDecoder:
    """For any other tokenizer: the library's stream, and a full decode for what it keeps."""

    def __init__(self, tokenizer: Tokenizer, tail: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(tail)
        self._num_shown = len(tokenizer.decode(self._ids))
        self._stream = tokenizer.decode_stream(self._ids)

    def step(self, token_id: int) -> str:
        self._ids.append(token_id)
        try:
            text = self._stream.step(token_id)
        except ValueError:
            # The library gives up on a prefix it cannot find again; a full decode still can.
            text = self._rest()
            self._stream = self._tokenizer.decode_stream(self._ids)
        self._num_shown += len(text)
        return text

    def flush(self) -> str:
        return self._rest()

    def _rest(self) -> str:
        return self._tokenizer.decode(self._ids)[self._num_shown :]
