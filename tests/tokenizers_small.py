"""Tokenizers for tests: the product's small one, and one that is not byte-level."""

import json
from functools import cache
from pathlib import Path

from minidsa.model.small_tokenizer import build_small_tokenizer
from minidsa.server.tokenizer import Tokenizer
from minidsa.server.tokenizer_files import TokenizerSettings

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


@cache
def small_tokenizer(vocab_size: int = 512) -> Tokenizer:
    """Control tokens at ids 0 to 10, every byte, and the merges that fit."""
    description = json.loads(build_small_tokenizer(vocab_size).to_str())
    return Tokenizer(description, TokenizerSettings(bos_token=BOS, eos_token=EOS))


@cache
def byte_fallback_tokenizer() -> Tokenizer:
    """Sentencepiece in manner: words begin with ▁, unknown characters fall back to bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b"]
    description = {
        "version": "1.0",
        "added_tokens": [_special(index, pieces[index]) for index in range(3)],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {piece: index for index, piece in enumerate(pieces)},
            "merges": [],
        },
    }
    return Tokenizer(description, TokenizerSettings(bos_token="<s>", eos_token="</s>"))


def write_files(folder: Path, **files: object) -> Path:
    """Write JSON files named by keyword, `tokenizer` for tokenizer.json."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def _special(index: int, content: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, "special": True, **flags}
