"""Decode requests grouped by length, with everything about them that no layer changes.

A group is computed as one padded batch, so a step costs the same few operations for one request
and for thirty. Lengths within a group differ by less than a factor of two: no request pays for a
much longer neighbour.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .metadata import AttentionBatch


@dataclass(frozen=True)
class DecodeGroup:
    """G requests of w tokens each.

    tokens_N: their rows among the decode tokens (N = G * w); None: all of them, in order.
    slots_GL: cache slots of their tokens; places beyond a request's length repeat its first slot,
        so that padding reads a row the request owns.
    counts_Gw: keys each token sees. padded: whether any token sees fewer than L.
    """

    tokens_N: Tensor | None
    slots_GL: Tensor
    counts_Gw: Tensor
    padded: bool

    @property
    def size(self) -> int:
        return len(self.slots_GL)

    @property
    def visible(self) -> Tensor | None:
        """counts_Gw where it hides anything."""
        return self.counts_Gw if self.padded else None

    def take(self, rows: Tensor) -> Tensor:
        """The group's rows of a tensor over all decode tokens, as [G, w, ...]."""
        own = rows if self.tokens_N is None else rows.index_select(0, self.tokens_N)
        return own.reshape(self.size, -1, *rows.shape[1:])


def request_slots(batch: AttentionBatch, request: int, page_size: int) -> Tensor:
    """Cache slots of every token of one request, [L] int64."""
    length = batch.kv_lens[request]
    pages = batch.block_table_BP[request, : -(-length // page_size)].long()
    offsets = torch.arange(page_size, device=pages.device)
    return (pages.unsqueeze(1) * page_size + offsets).flatten()[:length]


def group_decodes(batch: AttentionBatch, page_size: int, max_keys: int) -> list[DecodeGroup]:
    """Split the decode part into groups of at most `max_keys` keys (or one request)."""
    requests = sorted(
        range(batch.num_extends, len(batch.query_lens)), key=batch.kv_lens.__getitem__
    )
    groups: list[list[int]] = []
    for request in requests:
        length = batch.kv_lens[request]
        group = groups[-1] if groups else []
        fits = group and (len(group) + 1) * length <= max_keys
        if fits and length < 2 * batch.kv_lens[group[0]]:
            group.append(request)
        else:
            groups.append([request])
    if len(groups) == 1:
        return [_group(batch, sorted(requests), page_size, whole=True)]
    return [_group(batch, group, page_size, whole=False) for group in groups]


def _group(batch: AttentionBatch, requests: list[int], page_size: int, whole: bool) -> DecodeGroup:
    device, width = batch.block_table_BP.device, batch.decode_width
    lengths = [batch.kv_lens[r] for r in requests]
    longest = max(lengths)
    lengths_G1 = torch.tensor(lengths, device=device).unsqueeze(1)
    first = batch.num_extends
    table_GP = (
        batch.block_table_BP[first:]
        if whole
        else batch.block_table_BP[torch.tensor(requests, device=device)]
    )
    pages_GP = table_GP[:, : -(-longest // page_size)].long()
    offsets = torch.arange(page_size, device=device)
    slots_GL = (pages_GP.unsqueeze(-1) * page_size + offsets).flatten(1)[:, :longest]
    if min(lengths) < longest:
        beyond_GL = torch.arange(longest, device=device) >= lengths_G1
        slots_GL = torch.where(beyond_GL, slots_GL[:, :1], slots_GL)
    # Token j of w sees its context, the tokens before it and itself.
    counts_Gw = lengths_G1 - width + 1 + torch.arange(width, device=device)
    tokens = [(r - first) * width + j for r in requests for j in range(width)]
    return DecodeGroup(
        tokens_N=None if whole else torch.tensor(tokens, device=device),
        slots_GL=slots_GL,
        counts_Gw=counts_Gw,
        padded=width > 1 or min(lengths) < longest,
    )


def over_groups(
    groups: Sequence[DecodeGroup], rows: Tensor, attend: Callable[[DecodeGroup, Tensor], Tensor]
) -> Tensor:
    """Apply attend(group, its rows [G, w, ...]) -> [G * w, ...] to all groups; in token order."""
    if len(groups) == 1:
        return attend(groups[0], groups[0].take(rows))
    out = None
    for group in groups:
        part = attend(group, group.take(rows))
        if out is None:
            out = part.new_empty(len(rows), *part.shape[1:])
        out[group.tokens_N] = part
    if out is None:
        raise ValueError("a decode part without requests")
    return out
