"""The text side of a checkpoint: tokenizer, chat format, sampling defaults, read from its folder.

All of it is checked before a weight is read: first what the files say by themselves, then, once
the engine has checked the configuration, whether they fit the model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ..configs.engine_info import StartPlan
from ..configs.server import ChatFormatChoice
from ..configs.setting_error import SettingError
from .chat_formats import ChatFormat, choose_format
from .sampling import SamplingDefaults, read_defaults
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class TextFiles:
    """The files of a checkpoint that need no model to be read."""

    directory: Path
    tokenizer: Tokenizer
    defaults: SamplingDefaults
    notes: tuple[str, ...]

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Raises ValueError, in one line that names file and key, for what cannot be used."""
        tokenizer = Tokenizer.from_directory(directory)
        defaults, note = read_defaults(directory)
        return cls(directory, tokenizer, defaults, () if note is None else (note,))


@dataclass(frozen=True)
class TextSide:
    """What the request handlers need of a checkpoint's text; notes: choices made, with reasons."""

    tokenizer: Tokenizer
    chat_format: ChatFormat | None
    defaults: SamplingDefaults
    notes: tuple[str, ...]

    @classmethod
    def fit(cls, files: TextFiles, plan: StartPlan, wanted: ChatFormatChoice = "auto") -> Self:
        """Raises ValueError where the files do not fit the model, SettingError where the wanted
        format does not fit them."""
        files.tokenizer.check_vocab(plan.vocab_size)
        try:
            choice = choose_format(plan.model_type, files.directory, files.tokenizer, wanted)
        except ValueError as error:
            if wanted == "auto":
                raise
            raise SettingError(f"chat_format {wanted}: {error}") from None
        if choice is None:
            notes = ["chat is refused: the checkpoint has no chat format"]
        else:
            notes = [f"chat format {choice.format.name}: {choice.reason}"]
            notes += [] if choice.warning is None else [f"warning: {choice.warning}"]
        chat_format = None if choice is None else choice.format
        return cls(files.tokenizer, chat_format, files.defaults, (*files.notes, *notes))
