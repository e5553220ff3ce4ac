"""Scores and top-k of many queries in a bounded workspace.

A step's queries are cut into chunks whose fp32 scores fit the workspace: queries of a prompt times
the keys that the last of them sees. Scores of a chunk are written and chosen from before the next
chunk overwrites them. The cut depends on host lengths only, so it is made once a step and serves
all layers; a chunk of decodes keeps its shape from step to step and can be captured in a graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .fp8_rows import IndexPages, PlainIndexPages
from .indexer_logits import QueryGroups, group_size, indexer_logits, query_groups
from .indexer_logits_hopper import indexer_logits_hopper, suits
from .topk_triton import PagedSlots, select_top_k

# Rows of scores begin at multiples of 256 bytes, so that they are read in full lines.
COLUMN_STEP = 64


@dataclass(frozen=True)
class Chunk:
    """Neighbouring tokens scored together: their groups, counted from the first of them."""

    tokens: slice
    groups: QueryGroups
    columns: int


@dataclass(frozen=True)
class SelectionPlan:
    """What is the same in every layer of a step.

    visible_T: int32 keys each token sees; request_T: int32 row of the block table of each token.
    workspace_X: fp32, shared by all chunks and all layers.
    """

    chunks: list[Chunk]
    visible_T: Tensor
    request_T: Tensor
    workspace_X: Tensor


def workspace_floats(longest: int, heads: int, width: int) -> int:
    """The least workspace: one group of queries, of requests that bring `width` tokens each."""
    return group_size(width, heads) * _columns(longest)


def plan_selection(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    heads: int,
    workspace_X: Tensor,
    *,
    columns: int | None = None,
) -> SelectionPlan:
    """Cut the tokens of requests with these lengths into chunks.

    context_lens: tokens before the step's; -query_len for a padding request, which sees nothing.
    columns: keys to make room for where lengths will grow while shapes stay (graphs); by default
    each chunk has room for its longest. Raises ValueError when one group of queries does not fit.
    """
    device = workspace_X.device
    # A prompt has thousands of tokens: nothing is done token by token.
    lens, contexts = np.array(query_lens, np.int64), np.array(context_lens, np.int64)
    first_keys = contexts + 1 - (np.cumsum(lens) - lens)
    visible = np.maximum(first_keys.repeat(lens) + np.arange(lens.sum()), 0).astype(np.int32)
    requests = np.arange(len(lens), dtype=np.int32).repeat(lens)
    chunks = []
    for first, last in _cut(query_lens, visible, heads, workspace_X.numel(), columns):
        counts = np.bincount(requests[first:last] - requests[first]).tolist()
        groups = query_groups(counts, heads, device, first_request=int(requests[first]))
        widest = _columns(columns or int(visible[first:last].max()))
        chunks.append(Chunk(slice(first, last), groups, widest))
    return SelectionPlan(
        chunks,
        torch.from_numpy(visible).to(device),
        torch.from_numpy(requests).to(device),
        workspace_X,
    )


def _columns(keys: int) -> int:
    return -(-max(keys, 1) // COLUMN_STEP) * COLUMN_STEP


def _cut(
    query_lens: Sequence[int],
    visible: np.ndarray,
    heads: int,
    room: int,
    columns: int | None,
) -> list[tuple[int, int]]:
    """Bounds of chunks: whole groups of queries while rows times columns fit the room."""
    size = group_size(max(query_lens, default=1), heads)
    cuts, first, widest, token = [], 0, 0, 0
    for length in query_lens:
        # Most requests fit as a whole: no look at their groups.
        wide = max(widest, _columns(columns or visible[token + length - 1]))
        if length and (token + length - first) * wide <= room:
            token, widest = token + length, wide
            continue
        for start in range(token, token + length, size):
            stop = min(start + size, token + length)
            # The last token of a group sees the most.
            own = _columns(columns or visible[stop - 1])
            wide = max(widest, own)
            if start > first and (stop - first) * wide > room:
                cuts.append((first, start))
                first, wide = start, own
            if (stop - first) * wide > room:
                raise ValueError(
                    f"{stop - first} queries of {wide} keys need {4 * (stop - first) * wide} bytes "
                    f"for index scores, the workspace has {4 * room}"
                )
            widest = wide
        token += length
    return [*cuts, (first, token)] if token else []


def select_keys(
    plan: SelectionPlan,
    q_TnD: Tensor,
    weights_Tn: Tensor,
    pages: IndexPages | PlainIndexPages,
    table_BP: Tensor,
    out_TK: Tensor,
    *,
    as_slots: bool,
) -> Tensor:
    """Fill out_TK, int32 [T, k], with the best keys of every token; returns it.

    Ascending positions in the request, or their cache slots, and -1 behind min(k, visible). The
    other arguments are those of `indexer_logits`.
    """
    for chunk in plan.chunks:
        rows = chunk.tokens
        tokens = rows.stop - rows.start
        scores_TL = plan.workspace_X[: tokens * chunk.columns].view(tokens, chunk.columns)
        visible_T = plan.visible_T[rows]
        queries = q_TnD[rows]
        score = indexer_logits_hopper if suits(queries, pages, chunk.groups) else indexer_logits
        score(queries, weights_Tn[rows], pages, table_BP, chunk.groups, visible_T, scores_TL)
        slots = PagedSlots(table_BP, plan.request_T[rows], pages.page_size) if as_slots else None
        select_top_k(scores_TL, visible_T, out_TK.shape[1], slots=slots, out=out_TK[rows])
    return out_TK
