"""A step of replayed decodes, in two halves: its layers, and the choice of its tokens.

The layers need no more than the ids of the tokens before, which may be known to the device alone.
What a token is chosen by (penalties, grammars, budgets) is known once those tokens are booked: the
choice is given to the device then, while it works on the layers.
"""

from collections.abc import Sequence

import torch

from ..configs.sampling import SamplingParams
from .captured_step import Replayed
from .choosing import Choosing, Followed
from .deepseek import DeepseekModel
from .sequence import NON_FINITE, SampleInput, SequenceInput, SequenceOutput

# In place of a request that has ended: its row is there, and nobody takes what is chosen in it.
NOBODY = SampleInput(SamplingParams(max_tokens=1, seed=0, temperature=0.0), (), ())


class ReplayedStep:
    """See `sequence.Started`; every such step leads."""

    leads = True

    def __init__(
        self, model: DeepseekModel, sequences: Sequence[SequenceInput], replayed: Replayed
    ) -> None:
        self._model = model
        self._sequences = sequences
        self._hidden_TD = replayed.hidden_TD
        self._chosen = replayed.chosen

    @torch.inference_mode()
    def choose(self, wanted: Sequence[bool]) -> None:
        """Choose from the hidden states, unless the replay ended with a choice.

        To be called before the next step is started, which overwrites them.
        """
        if self._chosen is not None:
            return
        rows = [
            sequence.sample if is_wanted and sequence.sample is not None else NOBODY
            for sequence, is_wanted in zip(self._sequences, wanted, strict=True)
        ]
        self._chosen = Choosing.among(self._model.logits(self._hidden_TD), rows)

    def followed(self, places: Sequence[int]) -> Followed:
        """Tokens of these sequences, for the next step."""
        return Followed(self._choosing.ids_N, places)

    def outputs(self) -> list[SequenceOutput]:
        """One token each; waits for this step alone."""
        scores = self._choosing.scores()
        return [
            SequenceOutput([token], [scores[i]] if i in scores else [])
            if token >= 0
            else SequenceOutput(error=NON_FINITE)
            for i, token in enumerate(self._choosing.ids())
        ]

    @property
    def _choosing(self) -> Choosing:
        if self._chosen is None:
            raise RuntimeError("no tokens were chosen in this step")
        return self._chosen
