"""Proposes the tokens that the next step will verify, with the model's own MTP layer.

First the layer runs over all rows of the step, now that it is known what follows each of them: its
rows in the cache are thereby those of verified tokens, whatever it had guessed there before. From
the last true row it then goes on alone, a token at a time, feeding on its own guesses. Those rows
are overwritten by the next step, so a rejected guess leaves nothing behind.

Of a step with prompt chunks only the last row of each request needs the layer's result. There the
cache rows are all that is written at first; in a step of decodes a second plan would cost more,
unless nobody wants a draft.

Where steps are replayed as graphs, guesses are as well, and no plan is made for them.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from torch import Tensor

from ..attention.base import AttentionBackend, Plan
from ..kv_cache.storage import CacheStorage
from .decode_graphs import DecodeGraphs
from .deepseek import DeepseekModel
from .inputs import Span, attention_batch, to_tensor
from .recorded_layers import RecordedLayers
from .sequence import SequenceInput, SequenceOutput

Live = Sequence[tuple[SequenceInput, SequenceOutput]]


class MtpDrafter:
    """Guesses greedily: a guess is accepted as often as the model itself draws it."""

    def __init__(
        self,
        model: DeepseekModel,
        backend: AttentionBackend,
        storage: CacheStorage,
        graphs: DecodeGraphs | None = None,
        recorded: RecordedLayers | None = None,
    ) -> None:
        self._model = model
        self._backend = backend
        self._storage = storage
        self._graphs = graphs
        self._recorded = recorded

    def propose(
        self,
        hidden_TD: Tensor,
        plan: Plan | None,
        sequences: Sequence[SequenceInput],
        outputs: Sequence[SequenceOutput],
    ) -> None:
        """Write the layer's rows for all T tokens of a step and fill in `outputs[i].draft_ids`.

        hidden_TD and plan are those of the step, None of one that was replayed; `outputs` hold its
        sampled tokens.
        """
        following = list(chain.from_iterable(map(_following, sequences, outputs)))
        chunks, guessed = False, []
        is_wanted = any(sequence.num_to_draft for sequence in sequences)
        if plan is None:
            spans = [Span(s.context_len, len(s.token_ids), s.pages) for s in sequences]
            if not is_wanted and self._write_rows(following, hidden_TD, spans):
                return
            hidden_TD, guessed = self._guess(following, hidden_TD, spans)
        else:
            next_ids_T = to_tensor(following, self._model.device)
            chunks = plan.batch.num_extends > 0
            if chunks or not is_wanted:
                self._write(next_ids_T, hidden_TD, plan)
            else:
                hidden_TD = self._run(next_ids_T, hidden_TD, plan)
        rows, positions, live = [], [], []
        for end, sequence, output in zip(_ends(sequences), sequences, outputs, strict=True):
            if sequence.num_to_draft and output.token_ids:
                num_stale = len(sequence.draft_ids) + 1 - len(output.token_ids)
                rows.append(end - num_stale - 1)
                positions.append(sequence.context_len + len(sequence.token_ids) - num_stale - 1)
                live.append((sequence, output))
        if live:
            hidden_ND = hidden_TD[to_tensor(rows, self._model.device)]
            if chunks:
                last_ids = [output.token_ids[-1] for _, output in live]
                hidden_ND, ids = self._guess(last_ids, hidden_ND, _spans(positions, live))
            else:
                ids = [guessed[row] for row in rows] if guessed else self._choose(hidden_ND)
            self._continue(ids, hidden_ND, positions, live)

    def _continue(
        self, ids: list[int], hidden_ND: Tensor, positions: Sequence[int], live: Live
    ) -> None:
        """One token after the other; positions: the rows that hidden_ND are the results of.

        ids: the guesses made from hidden_ND.
        """
        while True:
            for (_, output), token_id in zip(live, ids, strict=True):
                output.draft_ids.append(token_id)
            going = [i for i, (s, o) in enumerate(live) if len(o.draft_ids) < s.num_to_draft]
            if not going:
                return
            if len(going) < len(live):
                ids = [ids[i] for i in going]
                hidden_ND = hidden_ND[to_tensor(going, self._model.device)]
            live, positions = [live[i] for i in going], [positions[i] + 1 for i in going]
            hidden_ND, ids = self._guess(ids, hidden_ND, _spans(positions, live))

    def _guess(
        self, next_ids: Sequence[int], hidden_ND: Tensor, spans: Sequence[Span]
    ) -> tuple[Tensor, list[int]]:
        """The layer's results for the rows of some spans, and the tokens it guesses from them."""
        if self._graphs is not None:
            replayed = self._graphs.guess(next_ids, hidden_ND, spans)
            if replayed is not None and replayed.chosen is not None:
                # A guess of something that is no number is as wrong as any.
                return replayed.hidden_TD, [max(0, token) for token in replayed.chosen.ids()]
        batch = attention_batch(spans, 0, self._storage.page_size, self._model.device)
        plan = self._backend.plan(batch)
        ids_N = to_tensor(next_ids, self._model.device)
        hidden_ND = self._run(ids_N, hidden_ND, plan)
        return hidden_ND, self._choose(hidden_ND)

    def _run(self, next_ids_T: Tensor, hidden_TD: Tensor, plan: Plan) -> Tensor:
        if self._recorded is not None:
            guessed_TD = self._recorded.guess(next_ids_T, hidden_TD, plan)
            if guessed_TD is not None:
                return guessed_TD
        return self._model.guess(next_ids_T, hidden_TD, plan, self._backend, self._storage)

    def _write(self, next_ids_T: Tensor, hidden_TD: Tensor, plan: Plan) -> None:
        recorded, inputs = self._recorded, (next_ids_T, hidden_TD, plan)
        if recorded is None or not recorded.write_guess_rows(*inputs):
            self._model.write_guess_rows(*inputs, self._backend, self._storage)

    def _write_rows(
        self, next_ids: Sequence[int], hidden_TD: Tensor, spans: Sequence[Span]
    ) -> bool:
        graphs = self._graphs
        return graphs is not None and graphs.write_guess_rows(next_ids, hidden_TD, spans)

    def _choose(self, hidden_ND: Tensor) -> list[int]:
        return self._model.logits(hidden_ND).argmax(dim=-1).tolist()


def _following(sequence: SequenceInput, output: SequenceOutput) -> list[int]:
    """The token after each row; rows behind a rejected draft get any."""
    ids = [*sequence.following_ids, *output.token_ids]
    return ids + [0] * (len(sequence.token_ids) - len(ids))


def _spans(positions: Sequence[int], live: Live) -> list[Span]:
    """One row of each request, at these positions."""
    return [Span(n, 1, s.pages) for n, (s, _) in zip(positions, live, strict=True)]


def _ends(sequences: Sequence[SequenceInput]) -> Iterator[int]:
    end = 0
    for sequence in sequences:
        end += len(sequence.token_ids)
        yield end
