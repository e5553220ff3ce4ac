"""A paged cache full of NaN, sequences whose rows and queries are known, and steps over them.

Every place that a step has no right to read holds NaN: unwritten slots, page 0, the padding of
block tables. A sequence has its queries fixed for every position, so the same token can be computed
by a chunk, a decode or a verify step, and compared with the oracle each time.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import attention_oracle as oracle
from minidsa.attention.base import AttentionBackend, IndexQuery, MlaLayer, Plan, Query
from minidsa.attention.metadata import AttentionBatch
from minidsa.kv_cache.layout import RowLayout
from minidsa.kv_cache.storage import CacheStorage

HEADS, NOPE, ROPE, LATENT, VALUE = 3, 8, 4, 12, 6
INDEX_HEADS, INDEX_WIDTH, TOPK = 4, 8, 16
LAYERS = 2
CPU = torch.device("cpu")


@dataclass
class Tokens:
    """Rows and queries of one sequence: [layers, tokens, ...]."""

    latent: Tensor
    rope: Tensor
    index_k: Tensor
    q_nope: Tensor
    q_rope: Tensor
    index_q: Tensor
    index_w: Tensor
    pages: list[int]
    written: int = 0

    def row(self, layer: int, position: int) -> oracle.Row:
        return oracle.Row(
            self.q_nope[layer, position],
            self.q_rope[layer, position],
            self.index_q[layer, position],
            self.index_w[layer, position],
        )


@dataclass(frozen=True)
class Chunk:
    """Tokens start..stop-1 of a sequence, computed in one step."""

    name: str
    start: int
    stop: int


@dataclass
class Bed:
    """The cache, two layers of weights and the sequences by name."""

    page_size: int = 4
    num_pages: int = 256
    index_layers: tuple[bool, ...] = (True,) * LAYERS
    heads: int = HEADS
    index_heads: int = INDEX_HEADS
    seed: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU  # of the cache, the weights, batches and queries
    sequences: dict[str, Tokens] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        layout = RowLayout(LATENT + ROPE, INDEX_WIDTH, self.index_layers)
        self.storage = CacheStorage(layout, self.num_pages, self.page_size, self.dtype, self.device)
        self.storage.latent_LSC.fill_(torch.nan)
        for keys in self.storage.index_k:
            if keys is not None:
                keys.fill_(torch.nan)
        self._free = list(range(1, self.num_pages))
        random.Random(self.seed).shuffle(self._free)
        self.layers = [self._layer(i) for i in range(len(self.index_layers))]

    def _layer(self, index: int) -> MlaLayer:
        # Both halves are slices of one tensor, as in a loaded model.
        kv_b = self.normal(self.heads, NOPE + VALUE, LATENT).to(self.device, self.dtype)
        return MlaLayer(index, (NOPE + ROPE) ** -0.5, kv_b[:, :NOPE], kv_b[:, NOPE:])

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def add(self, name: str, length: int, pages: list[int] | None = None) -> Tokens:
        """A new sequence of up to `length` tokens; nothing of it is cached yet."""
        count, layers = -(-length // self.page_size), len(self.layers)
        if pages is None:
            pages = [self._free.pop() for _ in range(count)]
        tokens = Tokens(
            latent=self.normal(layers, length, LATENT),
            rope=self.normal(layers, length, ROPE),
            index_k=self.normal(layers, length, INDEX_WIDTH),
            q_nope=self.normal(layers, length, self.heads, NOPE),
            q_rope=self.normal(layers, length, self.heads, ROPE),
            index_q=self.normal(layers, length, self.index_heads, INDEX_WIDTH),
            index_w=self.normal(layers, length, self.index_heads),
            pages=pages,
        )
        self.sequences[name] = tokens
        return tokens

    def write(self, name: str, stop: int) -> None:
        """Put the rows of tokens up to `stop` into the cache."""
        tokens = self.sequences[name]
        slots = torch.tensor(self.slots(name, tokens.written, stop), device=self.device)
        for layer in range(len(self.layers)):
            span = slice(tokens.written, stop)
            rows = torch.cat((tokens.latent[layer, span], tokens.rope[layer, span]), dim=-1)
            self.storage.write_latent(layer, slots, self._put(rows))
            if self.index_layers[layer]:
                self.storage.write_index(layer, slots, self._put(tokens.index_k[layer, span]))
        tokens.written = max(tokens.written, stop)

    def _put(self, values: Tensor) -> Tensor:
        return values.to(self.device, self.dtype)

    def slots(self, name: str, start: int, stop: int) -> list[int]:
        pages, size = self.sequences[name].pages, self.page_size
        return [pages[i // size] * size + i % size for i in range(start, stop)]

    def batch(
        self, chunks: Sequence[Chunk], num_extends: int, *, table_width: int | None = None
    ) -> AttentionBatch:
        """The step that computes these chunks; their rows are written on the way."""
        for chunk in chunks:
            if chunk.stop > self.sequences[chunk.name].written:
                self.write(chunk.name, chunk.stop)
        tables = [self.sequences[c.name].pages for c in chunks]
        width = table_width or max(-(-c.stop // self.page_size) for c in chunks)
        return AttentionBatch(
            num_extends=num_extends,
            query_lens=tuple(c.stop - c.start for c in chunks),
            context_lens=tuple(c.start for c in chunks),
            positions_T=torch.tensor(
                [i for c in chunks for i in range(c.start, c.stop)], device=self.device
            ),
            slots_T=torch.tensor(
                [s for c in chunks for s in self.slots(c.name, c.start, c.stop)],
                device=self.device,
            ),
            block_table_BP=torch.tensor(
                [t[:width] + [0] * (width - len(t)) for t in tables],
                dtype=torch.int32,
                device=self.device,
            ),
        )

    def query(self, chunks: Sequence[Chunk], layer: int) -> Query:
        def rows(name: str) -> Tensor:
            return torch.cat(
                [getattr(self.sequences[c.name], name)[layer, c.start : c.stop] for c in chunks]
            )

        index = IndexQuery(self._put(rows("index_q")), rows("index_w").to(self.device))
        return Query(self._put(rows("q_nope")), self._put(rows("q_rope")), index)

    def attend(
        self, backend: AttentionBackend, plan: Plan, chunks: Sequence[Chunk], layer: int = 0
    ) -> Tensor:
        """What the model does in one layer: [T, H, V] over both parts."""
        q, border = self.query(chunks, layer), plan.batch.num_extend_tokens
        total, parts = len(q.nope_THN), []
        if border:
            parts.append(backend.prefill(self.layers[layer], q.rows(0, border), plan))
        if border < total:
            parts.append(backend.decode(self.layers[layer], q.rows(border, total), plan))
        return torch.cat(parts)

    def step(
        self,
        backend: AttentionBackend,
        chunks: Sequence[Chunk],
        num_extends: int = 0,
        layer: int = 0,
    ) -> Tensor:
        """Plan and attend."""
        return self.attend(backend, backend.plan(self.batch(chunks, num_extends)), chunks, layer)

    def expected(self, chunks: Sequence[Chunk], topk: int | None = None, layer: int = 0) -> Tensor:
        """The oracle's answer; topk None: dense."""
        rows = [
            self.expected_row(c.name, i, topk, layer)
            for c in chunks
            for i in range(c.start, c.stop)
        ]
        return torch.stack(rows)

    def expected_row(self, name: str, position: int, topk: int | None, layer: int = 0) -> Tensor:
        tokens, count = self.sequences[name], position + 1
        chosen = list(range(count)) if topk is None else self.selected(name, position, topk, layer)
        mla = self.layers[layer]
        w_uk, w_uv = mla.w_uk_HNC.cpu().float(), mla.w_uv_HVC.cpu().float()
        weights = oracle.Weights(w_uk, w_uv, mla.scale)
        latents, ropes = tokens.latent[layer, chosen], tokens.rope[layer, chosen]
        return oracle.attend(weights, tokens.row(layer, position), latents, ropes)[0]

    def selected(self, name: str, position: int, topk: int = TOPK, layer: int = 0) -> list[int]:
        """Positions that a token attends to. A layer without index keys follows the one before."""
        while not self.index_layers[layer]:
            layer -= 1
        tokens = self.sequences[name]
        keys = tokens.index_k[layer, : position + 1]
        return oracle.sparse_positions(tokens.row(layer, position), keys, topk)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """fp32 rounding apart, and finite."""
    assert actual.isfinite().all()
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)
