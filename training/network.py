"""The trained network: MLA with DeepSeek Sparse Attention, and the multi-token-prediction layer.

`attend` chooses what a query may see: every earlier token (dense), the indexer's top-k (sparse), or
one of two deliberately bad selections of the same size that the evaluation uses as a control.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .layers import MLP, Indexer, MoE, RMSNorm, rotate_pairs, yarn_frequencies

Attend = Literal["dense", "sparse", "random", "window"]


# Per layer: KL of the indexer (scalar) and attention mass captured by its top-k [B, Q].
Report = tuple[Tensor, Tensor]


@dataclass
class Output:
    """Hidden states [B, T, D] after the final norm, those of the MTP layer, and the reports.

    drafts[d]: row i guesses token i + 2 from hidden i - d and its own guesses of depth d - 1.
    """

    hidden: Tensor
    drafts: list[Tensor]
    reports: list[Report]


def causal_mask(rows: Tensor, length: int) -> Tensor:
    """True where key position <= query position. rows [..., Q] -> [..., Q, T]."""
    return torch.arange(length, device=rows.device) <= rows.unsqueeze(-1)


def top_k_mask(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """True at the k best visible keys of each query (all of them where fewer are visible)."""
    best = (
        scores.masked_fill(~visible, float("-inf")).topk(min(k, scores.shape[-1]), dim=-1).indices
    )
    mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    return mask.scatter_(-1, best, True) & visible


class Attention(nn.Module):
    """Multi-head latent attention in its expanded form, with an indexer beside it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = c = config
        heads = c.num_attention_heads
        self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank)
        self.q_b_proj = nn.Linear(c.q_lora_rank, heads * c.qk_head_dim, bias=False)
        width = c.kv_lora_rank + c.qk_rope_head_dim
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, width, bias=False)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank)
        width = heads * (c.qk_nope_head_dim + c.v_head_dim)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, width, bias=False)
        self.o_proj = nn.Linear(heads * c.v_head_dim, c.hidden_size, bias=False)
        self.indexer = Indexer(config)

    def qkv(self, x: Tensor, rope: tuple[Tensor, Tensor]):
        """q, k [B, H, T, nope + rope], v [B, H, T, V], the normed query latent [B, T, q_lora]."""
        c, heads = self.config, self.config.num_attention_heads
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_latent).unflatten(-1, (heads, c.qk_head_dim))
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, -1))
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        k_rope = rotate_pairs(k_rope.unsqueeze(2), *rope).expand(-1, -1, heads, -1)
        q = torch.cat([q_nope, rotate_pairs(q_rope, *rope)], dim=-1).transpose(1, 2)
        k = torch.cat([k_nope, k_rope.to(k_nope.dtype)], dim=-1).transpose(1, 2)
        return q.to(v.dtype), k, v.transpose(1, 2), q_latent

    def among(self, x: Tensor, known: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Each row of `x` attends to itself and to the rows of `known` before it, all of them."""
        q, k, v, _ = self.qkv(x, rope)
        _, known_k, known_v, _ = self.qkv(known, rope)
        before = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril(-1)
        own = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        out = F.scaled_dot_product_attention(
            q,
            torch.cat([known_k, k], dim=2),
            torch.cat([known_v, v], dim=2),
            attn_mask=torch.cat([before, own], dim=1),
            scale=self.config.softmax_scale,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, probe: Tensor | None
    ) -> tuple[Tensor, Report | None]:
        """`probe` [B, Q] are the query positions for which the indexer is compared."""
        q, k, v, q_latent = self.qkv(x, rope)
        index = None
        if attend == "sparse" or probe is not None:
            # The language loss must not reach the indexer, nor the indexer's loss the model.
            index = self.indexer.project(x.detach(), q_latent.detach(), rope)
        allowed = self.allowed(attend, index, x)
        report = None
        if probe is not None and index is not None:
            report = self.compare(probe, index, q, k)
        scale = self.config.softmax_scale
        # Flash attention wants one head width for keys and values.
        padded = F.pad(v, (0, k.shape[-1] - v.shape[-1])) if allowed is None else v
        out = F.scaled_dot_product_attention(
            q, k, padded, attn_mask=allowed, is_causal=allowed is None, scale=scale
        )
        return self.o_proj(out[..., : v.shape[-1]].transpose(1, 2).flatten(2)), report

    @torch.no_grad()
    def allowed(self, attend: Attend, index, x: Tensor) -> Tensor | None:
        """The selection as a mask [B or 1, 1, T, T], None for plain causal attention."""
        topk, length = self.config.index_topk, x.shape[1]
        if attend == "dense" or length <= topk:
            return None
        visible = causal_mask(torch.arange(length, device=x.device), length)
        if attend == "sparse":
            assert index is not None
            return top_k_mask(self.indexer.scores(*index), visible, topk).unsqueeze(1)
        if attend == "window":
            return (visible & ~visible.tril(-topk))[None, None]
        noise = torch.rand(x.shape[0], length, length, device=x.device)
        # A query always sees itself: without it the control would fail for a trivial reason.
        noise += torch.eye(length, device=x.device)
        return top_k_mask(noise, visible, topk).unsqueeze(1)

    def compare(self, rows: Tensor, index, q: Tensor, k: Tensor) -> Report:
        """KL(attention summed over heads || softmax(index scores)) and the captured mass.

        The KL teaches the indexer only; the mass keeps its gradient into queries and keys.
        """
        length = q.shape[2]
        index_q, index_k, weights = index
        picked = rows[..., None, None].expand(-1, -1, *index_q.shape[2:])
        picked_weights = weights.gather(1, rows[..., None].expand(-1, -1, weights.shape[-1]))
        scores = self.indexer.scores(index_q.gather(1, picked), index_k, picked_weights)
        visible = causal_mask(rows, length)
        picked = rows[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[-1])
        logits = (q.gather(2, picked) @ k.transpose(2, 3)).float() * self.config.softmax_scale
        logits = logits.masked_fill(~visible.unsqueeze(1), float("-inf"))
        attention = logits.softmax(-1).mean(1)
        chosen = top_k_mask(scores.detach(), visible, self.config.index_topk)
        mass = (attention * chosen).sum(-1)
        target = attention.detach()
        log_index = scores.masked_fill(~visible, float("-inf")).log_softmax(-1)
        log_index = log_index.masked_fill(~visible, 0.0)
        cross = (target * (target.clamp_min(1e-9).log() - log_index)).sum(-1)
        return cross.mean(), mass


class Block(nn.Module):
    """One decoder layer; the first `first_k_dense_replace` have a dense MLP."""

    def __init__(self, config: ModelConfig, dense: bool):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size) if dense else MoE(config)

    def forward(self, x: Tensor, rope, attend: Attend, probe: Tensor | None):
        attended, report = self.self_attn(self.input_layernorm(x), rope, attend, probe)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), report


class MtpBlock(Block):
    """Predicts token i+2 from hidden i (after the final norm) and token i+1."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, dense=False)
        hidden = config.hidden_size
        self.enorm = RMSNorm(hidden, config.rms_norm_eps)
        self.hnorm = RMSNorm(hidden, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(hidden, config.rms_norm_eps)})

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The layer's input: embedding half first."""
        return self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))

    def go_on(self, joined: Tensor, known: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """The layer over rows that are guesses, each behind the rows of known tokens alone.

        That is how a second guess is made; a third one also sees the second, which is left out.
        """
        among = self.self_attn.among(
            self.input_layernorm(joined), self.input_layernorm(known), rope
        )
        x = joined + among
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The part of the checkpoint under `model.`; its last layer is the MTP layer."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        dense = config.first_k_dense_replace
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers: list[nn.Module] = [
            Block(config, i < dense) for i in range(config.num_hidden_layers)
        ]
        self.layers = nn.ModuleList([*layers, MtpBlock(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class TinyDsa(nn.Module):
    """The whole model. `forward` gives hidden states; `head` turns them into logits."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        angles = torch.outer(
            torch.arange(config.max_position_embeddings).float(), yarn_frequencies(config)
        )
        self.cos = nn.Buffer(angles.cos().unsqueeze(1), persistent=False)
        self.sin = nn.Buffer(angles.sin().unsqueeze(1), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal initialisation by fan-in; what writes into the residual stream starts smaller."""
        depth = (2 * self.config.num_hidden_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            std = 0.02 if "embed_tokens" in name else 0.5 * weight.shape[-1] ** -0.5
            small = "o_proj" in name or "down_proj" in name
            weight.normal_(0.0, std * depth if small else std)

    def forward(
        self,
        tokens: Tensor,
        following: Tensor | None = None,
        attend: Attend = "dense",
        probe: Tensor | None = None,
        depth: int = 1,
    ) -> Output:
        """tokens [B, T]; `following`, the token after each of them, switches the MTP layer on.

        It then runs `depth` times, from the second on over what it gave for the row before, and
        densely.
        """
        rope = (self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        x = self.model.embed_tokens(tokens)
        *blocks, mtp = self.model.layers
        reports = []
        for block in blocks:
            x, report = block(x, rope, attend, probe)
            reports.append(report)
        hidden, drafts = self.model.norm(x), []
        if following is not None:
            assert isinstance(mtp, MtpBlock)
            embedded = self.model.embed_tokens(following)
            known = mtp.join(embedded, hidden)
            x, report = mtp(known, rope, attend, probe)
            reports.append(report)
            drafts.append(mtp.shared_head["norm"](x))
            while len(drafts) < depth:
                carried = torch.cat([hidden[:, :1], drafts[-1][:, :-1]], dim=1)
                x = mtp.go_on(mtp.join(embedded, carried), known.detach(), rope)
                drafts.append(mtp.shared_head["norm"](x))
        return Output(hidden, drafts, [r for r in reports if r is not None])
