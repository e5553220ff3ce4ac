"""The work of a step cut into tiles: some queries against the cached rows of their requests.

Everything here is the same for all layers, so it is made once a step: which slots a tile reads,
which of its keys each query does not see. A layer then needs a handful of operations a tile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels.reference import BLOCK
from .metadata import Part
from .slots import RequestSlots

# The operations on a tile cost about as much time on a CPU as this many more keys for a query do
# (15 to 20 us). Requests whose lengths differ by less share a tile.
KEYS_WORTH_A_TILE = 256


@dataclass(frozen=True)
class Workspace:
    """What a tile may take: `elements` in all. A key costs `per_key` by itself (its copy) and
    `per_query` for each query of its request (scores). Only a tile of one query may take more.
    """

    elements: int
    per_key: int
    per_query: int

    def queries(self, length: int) -> int:
        """Queries of one request with `length` keys that fit, at least 1."""
        return max(1, (self.elements // max(length, 1) - self.per_key) // self.per_query)

    def requests(self, length: int, width: int) -> int:
        """Requests of `width` queries each, padded to `length` keys, that fit, at least 1."""
        per_request = length * (self.per_key + width * self.per_query)
        return max(1, self.elements // max(per_request, 1))


@dataclass(frozen=True)
class Tile:
    """w queries of each of G requests against the first L rows of the request.

    tokens: where the queries stand in the part, G * w of them.
    slots: what to read: one [G, L], or the pieces of a single request in order. In blocks, L is a
    multiple of BLOCK, and keys behind the request's last are hidden from every query.
    visible_T: keys that each of the G * w queries sees, int64.
    first_hidden: every query sees the keys before this one.
    hidden_TX: bool [G * w, L - first_hidden], True where a query does not see a key; None: nowhere.
    """

    tokens: slice | Tensor
    slots: Sequence[slice | Tensor]
    num_requests: int
    width: int
    length: int
    visible_T: Tensor
    first_hidden: int
    hidden_TX: Tensor | None

    def take(self, rows: Tensor) -> Tensor:
        """The tile's own rows of a tensor over the part's tokens, [G, w, ...]."""
        own = rows
        if not isinstance(self.tokens, slice):
            own = rows.index_select(0, self.tokens)
        elif self.num_requests * self.width < len(rows):
            own = rows[self.tokens]
        return own.view(self.num_requests, self.width, *rows.shape[1:])

    def put(self, rows: Tensor, own: Tensor) -> None:
        """Write the tile's own rows of a tensor over the part's tokens."""
        if self.num_requests * self.width == len(rows):
            rows.copy_(own)
        else:
            rows[self.tokens] = own

    def read(self, rows_of: Callable[[slice | Tensor], Tensor]) -> list[Tensor]:
        """The rows that `rows_of` finds in the tile's slots: pieces [G, L_i, X] of the L keys."""
        return [_with_requests(rows_of(slots)) for slots in self.slots]

    def clear_(self, out: Tensor) -> Tensor:
        """`out` [G * w, ...] with zeros for queries that see nothing."""
        if self.first_hidden or not self.length:
            return out
        empty_T = self.visible_T == 0
        return out.masked_fill_(empty_T.view(-1, *[1] * (out.dim() - 1)), 0.0)


def decode_tiles(
    part: Part,
    slots: RequestSlots,
    workspace: Workspace,
    *,
    longer_than: int = -1,
    in_blocks: bool = False,
) -> list[Tile]:
    """Tiles over the queries of all requests with more than `longer_than` tokens in the cache."""
    width = part.query_lens[0]
    requests = [r for r in range(len(part)) if part.kv_lens[r] > longer_than]
    tiles = []
    for group in _groups(part, None if in_blocks else slots, workspace, requests):
        length = _length(max(part.kv_lens[request] for request in group), in_blocks)
        # Queries of a request that do not fit together are cut; the request is alone then.
        step = width if len(group) > 1 else min(width, workspace.queries(length))
        for first in range(0, width, step):
            rows = range(first, min(first + step, width))
            tiles.append(_tile(part, _slots(slots, group, length, in_blocks), group, rows, length))
    return tiles


def extend_tiles(
    part: Part,
    request: int,
    slots: RequestSlots,
    workspace: Workspace,
    *,
    skip: int = 0,
    in_blocks: bool = False,
) -> list[Tile]:
    """Tiles over the queries of one prompt chunk that see more than `skip` keys."""
    context, query_len = part.context_lens[request], part.query_lens[request]
    step = workspace.queries(part.kv_lens[request])
    tiles = []
    for first in range(max(0, skip - context), query_len, step):
        rows = range(first, min(first + step, query_len))
        length = _length(context + rows.stop, in_blocks)
        slots_GL = _slots(slots, [request], length, in_blocks)
        tiles.append(_tile(part, slots_GL, [request], rows, length))
    return tiles


def _length(longest: int, in_blocks: bool) -> int:
    """Keys of a tile; in blocks at least one block, also for padding that sees none."""
    return max(1, -(-longest // BLOCK)) * BLOCK if in_blocks else longest


def _groups(
    part: Part, slots: RequestSlots | None, workspace: Workspace, requests: Sequence[int]
) -> list[list[int]]:
    """Requests that share a tile: of similar length, and small enough together.

    slots: where a long run of pages is to be read in place, which beats a copy into a shared tile.
    """
    width = part.query_lens[0]
    groups: list[list[int]] = []
    alone: list[list[int]] = []
    longest = 0
    for request in sorted(requests, key=lambda r: -part.kv_lens[r]):
        length = part.kv_lens[request]
        if slots and length > KEYS_WORTH_A_TILE and slots.has_long_run(request, length):
            alone.append([request])
        elif (
            groups
            and longest - length <= KEYS_WORTH_A_TILE
            and len(groups[-1]) < workspace.requests(longest, width)
        ):
            groups[-1].append(request)
        else:
            groups.append([request])
            longest = length
    return [sorted(group) for group in groups + alone]


def _tile(
    part: Part, slots: Sequence[slice | Tensor], group: Sequence[int], rows: range, length: int
) -> Tile:
    """Queries `rows` of each request in `group` (ascending) against their first `length` keys."""
    device = part.block_table_BP.device
    visible = [max(0, part.context_lens[r] + j + 1) for r in group for j in rows]
    visible_T = torch.tensor(visible, device=device)
    first_hidden = min(visible)
    hidden_TX = None
    if first_hidden < length:
        keys_X = torch.arange(first_hidden, length, device=device)
        hidden_TX = keys_X >= visible_T.unsqueeze(1)
    tokens = [part.starts[r] + j for r in group for j in rows]
    consecutive = tokens[-1] - tokens[0] == len(tokens) - 1
    return Tile(
        tokens=slice(tokens[0], tokens[-1] + 1)
        if consecutive
        else torch.tensor(tokens, device=device),
        slots=slots,
        num_requests=len(group),
        width=len(rows),
        length=length,
        visible_T=visible_T,
        first_hidden=first_hidden,
        hidden_TX=hidden_TX,
    )


def _slots(
    slots: RequestSlots, group: Sequence[int], length: int, in_blocks: bool
) -> Sequence[slice | Tensor]:
    if len(group) == 1 and not in_blocks:
        return slots.pieces(group[0], length)
    table_BL = slots.table_BL
    if len(group) < len(table_BL):
        table_BL = table_BL[torch.tensor(group, device=table_BL.device)]
    return [table_BL[:, :length]]


def _with_requests(rows: Tensor) -> Tensor:
    """Rows [L, X] of a single request as [1, L, X]; others as they are."""
    return rows.unsqueeze(0) if rows.dim() == 2 else rows
