"""The byte-level BPE tokenizer, with DeepSeek-V3.2's special tokens under their own names.

Only BOS, EOS, padding and the DSML marker are "special" (dropped when text is decoded); the role,
think and fim tokens are plain added tokens, exactly as in the published tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from .chat_format import ASSISTANT, BOS, DSML, END_THINK, EOS, FIM, PAD, THINK, USER, pieces
from .corpus import Mix, Source, documents
from .export import write_json

SPECIAL = (BOS, EOS, PAD, DSML)
PLAIN = (USER, ASSISTANT, THINK, END_THINK, *FIM)
# Ids 0, 1, 2 as in V3.2's config.json.
ORDER = (BOS, EOS, PAD, USER, ASSISTANT, THINK, END_THINK, DSML, *FIM)


def training_text(seed: int, count: int) -> Iterator[str]:
    """Documents of every kind, as the trainer will encode them, without the added tokens."""
    mix = Mix(talk=0.7, recall=0.15, repetition=0.02, plain=0.1, high=400)
    stream = documents(Source("", mix, 1, 1, seed), stream=-1)
    for _ in range(count):
        for text, _ in pieces(next(stream)):
            for token in ORDER:
                text = text.replace(token, "\n")
            yield text


def train(vocab_size: int, seed: int, count: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` ids, if the text has that many pieces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(name, special=name in SPECIAL) for name in ORDER],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(seed, count), trainer)
    # The trainer marks all of its reserved tokens special; V3.2 marks these as plain.
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in PLAIN])
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """tokenizer.json and the tokenizer_config.json that transformers reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    write_json(folder / "tokenizer_config.json", config)
