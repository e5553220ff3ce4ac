"""Text to ids and back, over the checkpoint's tokenizer.json.

Two tokenizers stand behind it. The full one knows the added tokens: it reads the prompts of
`/v1/completions`, where control literals are parsed (as vLLM does), and decodes. The plain one is a
copy without added tokens and without post-processor: it encodes the text runs of a chat, so that
whatever a user types stays text (see prompt_runs.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import tokenizers

from .prompt_runs import Control, Run, join_runs
from .tokenizer_files import TokenizerSettings, read_json, read_settings

# bytes.decode of the 256 code points that byte-level BPE writes bytes as, undone.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF = MappingProxyType(
    {chr(byte): byte for byte in _PRINTABLE}
    | {chr(0x100 + index): byte for index, byte in enumerate(_HIDDEN)}
)


class Tokenizer:
    """The tokenizer of one checkpoint; safe to use from several threads.

    `control` maps the literal of each added token to its id; `special_ids` are those with the
    "special" flag, the ones that `skip_special_tokens` leaves out. `vocab_size` is the largest id
    plus one. `bos_id` is None and `eos_ids` empty where the checkpoint names none.
    """

    def __init__(self, description: dict[str, Any], settings: TokenizerSettings) -> None:
        self._full = _build(description)
        self._plain = _build(_without_added_tokens(description))
        added = self._full.get_added_tokens_decoder()
        self.control: Mapping[str, int] = MappingProxyType(
            {token.content: token_id for token_id, token in added.items()}
        )
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        vocabulary = self._full.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.bos_id = self._resolve_bos(settings)
        self.eos_ids = self._resolve_eos(settings)
        self.is_byte_level = _is_byte_level(description)
        # A byte-level entry has one character a byte, so this bounds the text it stands for too.
        self.longest_token = max(map(len, vocabulary), default=1)
        self._keeps_all_text = self.is_byte_level and _normalizer_is_empty(description)

    @classmethod
    def from_directory(cls, directory: str | Path) -> "Tokenizer":
        """Read tokenizer.json and the config files beside it.

        Raises ValueError, in one line that names the file, when one is missing or unreadable.
        """
        folder = Path(directory)
        return cls(read_json(folder / "tokenizer.json"), read_settings(folder))

    def encode_text(self, text: str, add_bos: bool = True) -> list[int]:
        """Ids of a completions prompt; control literals in it become control tokens.

        BOS is put in front once: not again where the text begins with its literal. Raises
        ValueError for text that is not valid Unicode.
        """
        ids = _encode(self._full, text)
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def encode_runs(self, runs: Iterable[Run]) -> list[int]:
        """Ids of a prompt in runs; only a `Control` can yield a control token.

        Raises ValueError for an unknown control token or text that is not valid Unicode.
        """
        ids: list[int] = []
        for run in join_runs(runs):
            if isinstance(run, Control):
                ids.append(self.control_ids([run.literal])[0])
            else:
                ids += _encode(self._plain, run)
        return ids

    def control_ids(self, literals: Sequence[str]) -> list[int]:
        """Ids of control tokens; raises ValueError that lists every missing one."""
        missing = [literal for literal in literals if literal not in self.control]
        if missing:
            raise ValueError(f"the tokenizer lacks the control tokens {', '.join(missing)}")
        return [self.control[literal] for literal in literals]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The whole text of ids; ids without an entry (a padded vocabulary) show nothing."""
        # As when encoding, only the batch call lets other threads run meanwhile.
        return self._full.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def token_text(self, token_id: int) -> str:
        """What one token shows alone; a part of a character shows as U+FFFD."""
        return self._full.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, parts of characters included; empty for padding ids."""
        entry = self._full.id_to_token(token_id)
        if entry is None:
            return b""
        if entry in self.control:
            return entry.encode()
        if self.is_byte_level:
            known = [_BYTE_OF.get(character) for character in entry]
            return entry.encode() if None in known else bytes(b for b in known if b is not None)
        if len(entry) == 6 and entry.startswith("<0x") and entry.endswith(">"):
            return bytes([int(entry[3:5], 16)])
        return entry.replace("▁", " ").encode()

    def check_vocab(self, model_vocab_size: int) -> None:
        """Raise ValueError when an id of the tokenizer lies outside the model's vocabulary."""
        if self.vocab_size > model_vocab_size:
            raise ValueError(
                f"tokenizer.json: ids go up to {self.vocab_size - 1}, but config.json has "
                f"vocab_size = {model_vocab_size}"
            )

    def could_fit(self, num_characters: int, num_tokens: int) -> bool:
        """False when so much text cannot be that few tokens; decided without encoding it.

        Long words cost more than linear time to encode, so a prompt that cannot fit is refused
        first. Always true where a normalizer may drop characters.
        """
        return not self._keeps_all_text or num_characters <= num_tokens * self.longest_token

    def decode_stream(self, ids: Sequence[int]) -> "TokenStream":
        """The library's incremental decoder, started behind `ids`."""
        return TokenStream(self._full, list(ids))

    def _resolve_bos(self, settings: TokenizerSettings) -> int | None:
        return self.control.get(settings.bos_token or "", settings.bos_id)

    def _resolve_eos(self, settings: TokenizerSettings) -> tuple[int, ...]:
        named = self.control.get(settings.eos_token or "")
        return settings.eos_ids or (() if named is None else (named,))


class TokenStream:
    """tokenizers' DecodeStream bound to its tokenizer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._stream = tokenizers.decoders.DecodeStream(ids=ids, skip_special_tokens=False)

    def step(self, token_id: int) -> str:
        """Text that is complete with this token, or nothing; raises ValueError if it is lost."""
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:  # the library raises bare Exception for an invalid prefix
            raise ValueError(f"the stream cannot be decoded: {error}") from error


def check_text(text: str) -> str:
    """The text itself; raises ValueError where it holds a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text holds a lone surrogate (U+{ord(text[error.start]):04X} at character "
            f"{error.start}), which is not valid Unicode"
        ) from None
    return text


def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    # Of the library's encoders only the batch ones let other threads run meanwhile: a word of a
    # million letters takes seconds, and the event loop must not wait for it.
    return tokenizer.encode_batch_fast([check_text(text)], add_special_tokens=False)[0].ids


def _build(description: dict[str, Any]) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(msgspec.json.encode(description))
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise ValueError(f"tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _without_added_tokens(description: dict[str, Any]) -> dict[str, Any]:
    """The same model without the entries of added tokens, wherever they are listed."""
    names = {token["content"] for token in description.get("added_tokens") or ()}
    model = dict(description["model"])
    if isinstance(model.get("vocab"), dict):
        kept = model.get("unk_token")
        model["vocab"] = {
            entry: token_id
            for entry, token_id in model["vocab"].items()
            if entry not in names or entry == kept
        }
    return description | {"added_tokens": [], "post_processor": None, "model": model}


def _is_byte_level(description: dict[str, Any]) -> bool:
    decoder = description.get("decoder") or {}
    return decoder.get("type") == "ByteLevel"


def _normalizer_is_empty(description: dict[str, Any]) -> bool:
    normalizer = description.get("normalizer")
    return not normalizer or normalizer == {"type": "Sequence", "normalizers": []}
