"""A byte-level BPE small enough to train in memory, with the control tokens of DeepSeek-V3.2.

Random and tiny checkpoints need a tokenizer that behaves like the published one: every byte
encodes, punctuation merges with the newlines after it, and the control tokens carry the names and
flags the server looks up (the role and think tokens are not "special", `｜DSML｜` is). The training
text is part of this file, so equal sizes give equal tokenizers anywhere.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"

# In the order of their ids; the flag is the "special" flag of tokenizer.json.
CONTROL_TOKENS = (
    (BOS, True),
    (EOS, True),
    (PAD, True),
    ("｜DSML｜", True),
    ("<think>", False),
    ("</think>", False),
    ("<｜fim▁hole｜>", False),
    ("<｜fim▁begin｜>", False),
    ("<｜fim▁end｜>", False),
    ("<｜User｜>", False),
    ("<｜Assistant｜>", False),
)

SMALLEST_VOCABULARY = 256 + len(CONTROL_TOKENS)

# Digits by threes, words with the space before them, punctuation with the newlines after it.
_SPLITS = (
    r"\p{N}{1,3}",
    r"[^\r\n\p{L}\p{P}\p{S}\p{N}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

_TRAINING_TEXT = """\
You are a helpful assistant. You answer in short sentences, and you say so when you do not know.
The capital of France is Paris. The capital of Japan is Tokyo. What is the capital of Italy?
Once upon a time there was a small bear who lived near the river and loved to read books.
One day the bear asked the fox: "Where are you going with that lantern?" The fox smiled.
There are three apples, two pears and seven plums in the basket. How many fruits are there?
The weather tomorrow in the city will be sunny, then cloudy; take an umbrella for the evening.
Here is the list of the words that rhyme with the night: light, bright, sight, right.

## Tools

{"name": "get_weather", "description": "Get the weather", "parameters": {"type": "object",
"properties": {"location": {"type": "string"}, "days": {"type": "integer"}}, "required": []}}
<function_results>
<result>{"temperature": 21, "unit": "celsius", "wind": [3, 5, 8]}</result>
</function_results>
def add(first, second):
    return first + second

for index in range(10):
    print(index, "is the number", index * index)
"""


def build_small_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer with at most `vocab_size` entries; ids 0 to 10 are the control tokens.

    The training text runs out of pairs below seven hundred entries, so a larger size gives
    a smaller tokenizer; the rest of the model's vocabulary is then padding. Raises ValueError when
    the bytes and the control tokens do not fit.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(f"a vocabulary needs {SMALLEST_VOCABULARY} entries, not {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    split = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(name, normalized=False) for name, _ in CONTROL_TOKENS],
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT.splitlines(keepends=True), trainer)
    return _with_published_flags(tokenizer)


def write_tokenizer(directory: str | Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json into an existing folder."""
    folder = Path(directory)
    build_small_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _with_published_flags(tokenizer: Tokenizer) -> Tokenizer:
    """Training marks every control token special; the published file does not."""
    description = json.loads(tokenizer.to_str())
    special = dict(CONTROL_TOKENS)
    for token in description["added_tokens"]:
        token["special"] = special[token["content"]]
        token["normalized"] = not token["special"]
    return Tokenizer.from_str(json.dumps(description))
