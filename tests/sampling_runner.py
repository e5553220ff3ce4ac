"""An engine without a model whose tokens are sampled: logits are a hash of the tokens it sees.

So whatever a request asks of the sampler shows in its tokens, as does a row that is not its own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from late_device import PlainRunner
from minidsa.model.choosing import Choosing
from minidsa.model.sequence import SequenceInput, SequenceOutput
from scheduler_fakes import VOCAB, next_token


def logits_of(tokens: Sequence[int]) -> Tensor:
    """fp32 [1, VOCAB]."""
    generator = torch.Generator().manual_seed(VOCAB * tokens[-1] + next_token(tokens))
    return 2 * torch.randn(1, VOCAB, generator=generator)


class SamplingRunner(PlainRunner):
    """Drafts nothing."""

    def _output(self, sequence: SequenceInput) -> SequenceOutput:
        seen = self._seen(sequence)
        if sequence.sample is None:
            return SequenceOutput()
        chosen = Choosing.among(logits_of(seen), [sequence.sample])
        return SequenceOutput(chosen.ids(), list(chosen.scores().values()))
