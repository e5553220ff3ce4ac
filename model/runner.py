"""Runs one step of the model: from the scheduler's lists to tensors, and back to token ids.

Here sampled tokens become host integers again, and drafts are held against them.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from ..attention.base import AttentionBackend, Plan
from ..attention.sparse.dsa import DsaBackend
from ..configs.logprobs import TokenLogprobs
from ..configs.sampling import AttentionRule
from ..kv_cache.storage import CacheStorage
from .captured_step import Replayed
from .choosing import Choosing
from .decode_graphs import USUAL_LENGTH, DecodeGraphs
from .deepseek import DeepseekModel
from .drafter import MtpDrafter
from .inputs import Span, attention_batch, to_tensor
from .layer_graphs import LayerGraphs
from .logprobs import score_tokens
from .recorded_layers import RecordedLayers
from .replayed_step import ReplayedStep
from .sequence import (
    NON_FINITE,
    PROMPT_ROWS_AT_ONCE,
    Computed,
    SampleInput,
    SequenceInput,
    SequenceOutput,
    Started,
    num_accepted,
)

# A request that is sampled, where its tokens go, and the first of its rows among those sampled.
Sampled = tuple[SequenceInput, SequenceOutput, int]


class ModelRunner:
    """A model, its cache memory and the backend that attends over it.

    A model with an MTP layer writes that layer's rows too, and proposes what it is asked for.
    graphs: replays of decode steps; layer_graphs: of the layers in other steps; recorded: the
    layers of small steps on a CPU. Without them steps run eagerly.
    """

    def __init__(
        self,
        model: DeepseekModel,
        backend: AttentionBackend,
        storage: CacheStorage,
        graphs: DecodeGraphs | None = None,
        layer_graphs: LayerGraphs | None = None,
        recorded: RecordedLayers | None = None,
    ) -> None:
        self.model = model
        self.backend = backend
        self.storage = storage
        self.graphs = graphs
        self.layer_graphs = layer_graphs
        self.recorded = recorded
        self.device = storage.latent_LSC.device
        self.drafter = None
        if model.mtp is not None:
            self.drafter = MtpDrafter(model, backend, storage, graphs, recorded)

    @torch.inference_mode()
    def prepare(self, requests: int, num_drafts: int, longest: int) -> Iterator[str]:
        """Capture what is to be replayed, and compile its kernels; says what comes next.

        requests: that run at once, with so many drafts and `longest` tokens each at most.
        """
        if self.graphs is not None:
            lengths = {min(longest, USUAL_LENGTH)}
            if self.backend.selects(longest):
                lengths.add(longest)
            for width in sorted({1, 1 + num_drafts}):
                yield from self.graphs.prepare(requests, width, sorted(lengths))
        if self.layer_graphs is not None:
            for selects in sorted({False, self.backend.selects(longest)}):
                yield from self.layer_graphs.prepare(selects=selects)

    def start(
        self, sequences: Sequence[SequenceInput], num_extends: int, behind: Started | None = None
    ) -> Started:
        """Give one step to the device; `sequences` holds the extends first, then the decodes.

        behind: the step before, which led and is being chosen: the sequences follow it. A replayed
        step of decodes leads, without a drafter; every other one is computed at once. Raises
        ValueError for a rule of attention where the backend knows none, and for a step that is not
        replayed, though it is to follow one.
        """
        is_plain = not num_extends and all(s.is_decode for s in sequences)
        if is_plain and self.drafter is None and isinstance(behind, ReplayedStep | None):
            started = self._replay(sequences, behind)
            if started is not None:
                return started
        if behind is not None:
            raise ValueError("the step behind a leading one cannot be replayed")
        return Computed(self.run(sequences, num_extends))

    @torch.inference_mode()
    def _replay(
        self, sequences: Sequence[SequenceInput], behind: ReplayedStep | None
    ) -> ReplayedStep | None:
        """Give the layers of decodes to the device; None where nothing is replayed."""
        if self.graphs is None:
            return None
        spans = [Span(s.context_len, 1, s.pages) for s in sequences]
        if behind is None:
            ids = [token for s in sequences for token in s.token_ids]
        else:
            ids = behind.followed([s.follows for s in sequences if s.follows is not None])
        replayed = self.graphs.forward(ids, spans, greedy=_are_greedy(sequences))
        if replayed is None:
            return None
        self._count(spans, 0)
        return ReplayedStep(self.model, sequences, replayed)

    def run(self, sequences: Sequence[SequenceInput], num_extends: int) -> list[SequenceOutput]:
        """Compute one step and wait for it; see `start`."""
        rules = {sequence.attention for sequence in sequences}
        if rules == {None}:
            return self._run(sequences, num_extends)
        outputs = [SequenceOutput() for _ in sequences]
        for rule in rules:
            places = [i for i, sequence in enumerate(sequences) if sequence.attention == rule]
            runner = self if rule is None else self._under(rule)
            count = sum(i < num_extends for i in places)
            for i, output in zip(
                places, runner._run([sequences[i] for i in places], count), strict=True
            ):
                outputs[i] = output
        return outputs

    def _under(self, rule: AttentionRule) -> "ModelRunner":
        """The same model over the same rows for requests with a rule; it replays no graphs."""
        if not isinstance(self.backend, DsaBackend):
            raise ValueError(f"the backend {self.backend.name} attends by no rule of a request")
        return ModelRunner(self.model, self.backend.under(rule), self.storage)

    @torch.inference_mode()
    def _run(self, sequences: Sequence[SequenceInput], num_extends: int) -> list[SequenceOutput]:
        spans = [Span(s.context_len, len(s.token_ids), s.pages) for s in sequences]
        token_ids = list(chain.from_iterable(s.token_ids for s in sequences))
        self._count(spans, num_extends)
        replayed = plan = None
        if self.graphs is not None and not num_extends:
            greedy = _are_greedy(sequences)
            replayed = self.graphs.forward(token_ids, spans, greedy=greedy)
        if replayed is None:
            plan = self._plan(spans, num_extends)
            ids_T = to_tensor(token_ids, self.device)
            replayed = Replayed(self._forward(ids_T, plan), None)
        hidden_TD = replayed.hidden_TD
        ends = list(accumulate(span.num_tokens for span in spans))
        outputs = [SequenceOutput() for _ in sequences]
        self._sample(replayed, sequences, ends, outputs)
        for sequence, end, output in zip(sequences, ends, outputs, strict=True):
            if sequence.num_prompt_logprobs is not None and output.error is None:
                start = end - len(sequence.token_ids)
                scores = self._prompt_scores(hidden_TD, start, sequence)
                output.prompt_logprobs.extend(scores)
                if not all(math.isfinite(score.logprob) for score in scores):
                    output.error = NON_FINITE
        if self.drafter is not None:
            self.drafter.propose(hidden_TD, plan, sequences, outputs)
        return outputs

    def _forward(self, ids_T: Tensor, plan: Plan) -> Tensor:
        for layers in (self.layer_graphs, self.recorded):
            if layers is not None:
                hidden_TD = layers.forward(ids_T, plan)
                if hidden_TD is not None:
                    return hidden_TD
        return self.model.forward(ids_T, plan, self.backend, self.storage)

    def _count(self, spans: Sequence[Span], num_extends: int) -> None:
        if isinstance(self.backend, DsaBackend):
            lengths = [span.stop for span in spans]
            self.backend.count((lengths[:num_extends], lengths[num_extends:]))

    def _plan(self, spans: Sequence[Span], num_extends: int) -> Plan:
        batch = attention_batch(spans, num_extends, self.storage.page_size, self.device)
        return self.backend.plan(batch)

    def _sample(
        self,
        replayed: Replayed,
        sequences: Sequence[SequenceInput],
        ends: Sequence[int],
        outputs: Sequence[SequenceOutput],
    ) -> None:
        """Sample behind the last known token and behind each draft, and keep what agrees."""
        rows: list[int] = []
        sampled: list[Sampled] = []
        for sequence, end, output in zip(sequences, ends, outputs, strict=True):
            if sequence.sample is None:
                continue
            drafts = sequence.draft_ids
            sampled.append((sequence, output, len(rows)))
            rows.extend(range(end - len(drafts) - 1, end))
        if not rows:
            return
        chosen = replayed.chosen
        if chosen is None:
            hidden_ND = replayed.hidden_TD[to_tensor(rows, self.device)]
            chosen = Choosing.among(self.model.logits(hidden_ND), _sample_inputs(sampled))
        # A replay that ends with a choice makes it in all rows, each of which is sampled.
        tokens, scores = chosen.ids(), chosen.scores()
        for sequence, output, first in sampled:
            stop = first + 1 + num_accepted(sequence.draft_ids, tokens[first:])
            if -1 in tokens[first:stop]:
                stop = tokens.index(-1, first)
            output.token_ids = tokens[first:stop]
            output.logprobs = [scores[row] for row in range(first, stop) if row in scores]
            output.error = NON_FINITE if stop == first else None

    def _prompt_scores(
        self, hidden_TD: Tensor, start: int, sequence: SequenceInput
    ) -> list[TokenLogprobs]:
        targets = sequence.following_ids
        scores: list[TokenLogprobs] = []
        for i in range(0, len(targets), PROMPT_ROWS_AT_ONCE):
            tile = targets[i : i + PROMPT_ROWS_AT_ONCE]
            logits_NV = self.model.logits(hidden_TD[start + i : start + i + len(tile)])
            scores += score_tokens(logits_NV, tile, sequence.num_prompt_logprobs or 0)
        return scores


def _are_greedy(sequences: Sequence[SequenceInput]) -> bool:
    return all(s.sample is not None and s.sample.is_greedy for s in sequences)


def _sample_inputs(sampled: Sequence[Sampled]) -> list[SampleInput]:
    """What each row is sampled with: the last known token's, and those behind the drafts."""
    return [
        sequence.sample.after(sequence.draft_ids[:i])
        for sequence, _, _ in sampled
        if sequence.sample is not None
        for i in range(len(sequence.draft_ids) + 1)
    ]
