"""The simplest attention backend that keeps the contract: expanded keys, one request at a time."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from minidsa.attention.base import AttentionBackend, MlaLayer, Plan, Query
from minidsa.attention.metadata import AttentionBatch
from minidsa.kv_cache.storage import CacheStorage


@dataclass
class PlainPlan:
    batch: AttentionBatch
    selects: bool


@dataclass
class PlainBackend(AttentionBackend):
    """Reads whole pages of `storage`; topk 0: dense. `selected` keeps what each row chose."""

    storage: CacheStorage
    topk: int = 0
    name: str = "plain"
    selected: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    @property
    def page_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.storage.page_size

    def plan(self, batch: AttentionBatch, *, out: Plan | None = None) -> PlainPlan:
        return PlainPlan(batch, bool(self.topk) and max(batch.kv_lens) > self.topk)

    def prefill(self, layer: MlaLayer, q: Query, plan: Plan) -> Tensor:
        return self._attend(layer, q, plan, range(plan.batch.num_extends))

    def decode(self, layer: MlaLayer, q: Query, plan: Plan) -> Tensor:
        batch = plan.batch
        return self._attend(layer, q, plan, range(batch.num_extends, len(batch.query_lens)))

    def _attend(self, layer: MlaLayer, q: Query, plan: Plan, requests: range) -> Tensor:
        outputs, start = [], 0
        for i in requests:
            stop = start + plan.batch.query_lens[i]
            outputs.append(self._one(layer, q.rows(start, stop), plan.batch, i))
            start = stop
        return torch.cat(outputs)

    def _one(self, layer: MlaLayer, q: Query, batch: AttentionBatch, request: int) -> Tensor:
        length, context = batch.kv_lens[request], batch.context_lens[request]
        pages = batch.block_table_BP[request].long() * self.page_size
        slots = (pages.unsqueeze(1) + torch.arange(self.page_size)).flatten()[:length]
        rows = self.storage.latent_LSC[layer.index, slots]
        latent, rope = rows.split([layer.w_uk_HNC.shape[2], q.rope_THR.shape[2]], -1)
        logits = torch.einsum("thn,hnc,sc->hts", q.nope_THN, layer.w_uk_HNC, latent)
        logits = (logits + torch.einsum("thr,sr->hts", q.rope_THR, rope)) * layer.scale
        allowed = torch.arange(length) <= torch.arange(context, length).unsqueeze(1)
        keys = self.storage.index_k[layer.index]
        if self.topk and length > self.topk:
            assert q.index is not None and keys is not None
            dots = torch.einsum("tnd,sd->tns", q.index.q_TnD, keys[slots]).relu()
            scores = torch.einsum("tn,tns->ts", q.index.weights_Tn, dots)
            scores = scores.masked_fill(~allowed, -torch.inf)
            order = scores.sort(dim=-1, descending=True, stable=True).indices[:, : self.topk]
            for row, chosen in enumerate(order.tolist()):
                self.selected[layer.index, context + row] = chosen[: context + row + 1]
            allowed &= torch.zeros_like(allowed).scatter_(1, order, True)
        probabilities = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
        return torch.einsum("hts,sc,hvc->thv", probabilities, latent, layer.w_uv_HVC)
