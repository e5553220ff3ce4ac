"""Runs one step of the model: from the scheduler's lists to tensors, and back to token ids.

This is the only place where host integers become device tensors and where sampled tokens become
host integers again.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from ..attention.base import AttentionBackend
from ..attention.metadata import AttentionBatch
from ..configs.logprobs import TokenLogprobs
from ..kv_cache.block_table import token_slots
from ..kv_cache.storage import CacheStorage
from .deepseek import DeepseekModel
from .logprobs import ROWS_AT_ONCE, score_tokens
from .sampler import sample
from .sequence import NON_FINITE, SampleInput, SequenceInput, SequenceOutput


class ModelRunner:
    """A model, its cache memory and the backend that attends over it."""

    def __init__(
        self, model: DeepseekModel, backend: AttentionBackend, storage: CacheStorage
    ) -> None:
        self.model = model
        self.backend = backend
        self.storage = storage
        self.device = storage.latent_LSC.device

    @torch.inference_mode()
    def run(self, sequences: Sequence[SequenceInput], num_extends: int) -> list[SequenceOutput]:
        """Compute one step; `sequences` holds the extends first, then the decodes."""
        batch = self._batch(sequences, num_extends)
        token_ids_T = self._tensor(list(chain.from_iterable(s.token_ids for s in sequences)))
        plan = self.backend.plan(batch)
        hidden_TD = self.model.forward(token_ids_T, plan, self.backend, self.storage)
        ends = _running_ends(batch.query_lens)
        outputs = [SequenceOutput() for _ in sequences]
        self._sample(hidden_TD, sequences, ends, outputs)
        for i, (sequence, end) in enumerate(zip(sequences, ends, strict=True)):
            if sequence.prompt_targets and outputs[i].error is None:
                start = end - len(sequence.token_ids)
                outputs[i].prompt_logprobs.extend(self._prompt_scores(hidden_TD, start, sequence))
        return outputs

    def _batch(self, sequences: Sequence[SequenceInput], num_extends: int) -> AttentionBatch:
        size = self.storage.page_size
        positions: list[int] = []
        slots: list[int] = []
        for s in sequences:
            span = range(s.context_len, s.context_len + len(s.token_ids))
            positions.extend(span)
            slots += token_slots(s.pages, size, span.start, span.stop)
        width = max(-(-(s.context_len + len(s.token_ids)) // size) for s in sequences)
        tables = [[*s.pages[:width], *[0] * (width - len(s.pages))] for s in sequences]
        return AttentionBatch(
            num_extends=num_extends,
            query_lens=tuple(len(s.token_ids) for s in sequences),
            context_lens=tuple(s.context_len for s in sequences),
            positions_T=self._tensor(positions),
            slots_T=self._tensor(slots),
            block_table_BP=self._tensor(tables, torch.int32),
        )

    def _sample(
        self,
        hidden_TD: Tensor,
        sequences: Sequence[SequenceInput],
        ends: Sequence[int],
        outputs: list[SequenceOutput],
    ) -> None:
        chosen = [(i, s.sample) for i, s in enumerate(sequences) if s.sample is not None]
        if not chosen:
            return
        rows = [ends[i] - 1 for i, _ in chosen]
        logits_NV = self.model.logits(hidden_TD[self._tensor(rows)])
        inputs = [row for _, row in chosen]
        tokens = sample(logits_NV, inputs)
        # A sum is finite only if every term is: one small reduction guards every row.
        finite = logits_NV.sum(dim=-1).isfinite().tolist()
        scores = self._scores(logits_NV, tokens, inputs)
        for n, (i, _) in enumerate(chosen):
            outputs[i] = (
                SequenceOutput(tokens[n], scores.get(n))
                if finite[n]
                else SequenceOutput(error=NON_FINITE)
            )

    def _scores(
        self, logits_NV: Tensor, tokens: Sequence[int], inputs: Sequence[SampleInput]
    ) -> dict[int, TokenLogprobs]:
        counts = {n: r.params.logprobs for n, r in enumerate(inputs)}
        wanted = {n: top for n, top in counts.items() if top is not None}
        if not wanted:
            return {}
        rows = list(wanted)
        most = max(wanted.values())
        scores = score_tokens(logits_NV[rows], [tokens[n] for n in rows], most)
        return {n: _trim(s, wanted[n]) for n, s in zip(rows, scores, strict=True)}

    def _prompt_scores(
        self, hidden_TD: Tensor, start: int, sequence: SequenceInput
    ) -> list[TokenLogprobs]:
        targets = sequence.prompt_targets
        scores: list[TokenLogprobs] = []
        for i in range(0, len(targets), ROWS_AT_ONCE):
            tile = targets[i : i + ROWS_AT_ONCE]
            logits_NV = self.model.logits(hidden_TD[start + i : start + i + len(tile)])
            scores += score_tokens(logits_NV, tile, sequence.num_prompt_logprobs)
        return scores

    def _tensor(self, values: Sequence, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)


def _running_ends(lengths: Sequence[int]) -> list[int]:
    ends, total = [], 0
    for length in lengths:
        total += length
        ends.append(total)
    return ends


def _trim(score: TokenLogprobs, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(
        score.logprob, score.rank, score.top_ids[:num_top], score.top_logprobs[:num_top]
    )
