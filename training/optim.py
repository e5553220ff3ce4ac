"""Muon for the matrices inside layers, AdamW for everything else.

Muon (orthogonalised momentum) reaches the recall circuits in a fraction of AdamW's steps, which is
what makes a ten-minute training possible. Matrices of one shape are orthogonalised as one batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .network import TinyDsa

# Quintic Newton-Schulz coefficients of Muon: steep at zero, singular values end near one.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Makes the size of a Muon update that of an AdamW update, so both take the same learning rate.
RMS_MATCH = 0.2


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrices, approximately. [N, R, C] -> [N, R, C] in bf16."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised. Parameters are [R, C], or [N, R, C] for N matrices."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, decay: float, momentum=0.95):
        super().__init__(list(params), {"lr": lr, "decay": decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update; parameters without a gradient are left alone."""
        del closure
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[tuple(param.shape)].append(param)
            for shape, params in by_shape.items():
                self.update(group, shape, params)

    def update(self, group: dict, shape: tuple[int, ...], params: list[nn.Parameter]) -> None:
        """Update all parameters of one shape."""
        grads = torch.stack([p.grad for p in params if p.grad is not None])
        # The first parameter of a shape keeps the momentum of all.
        state = self.state[params[0]]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(grads)
        momentum = state["momentum"].lerp_(grads, 1 - group["momentum"])
        nesterov = grads.lerp(momentum, group["momentum"])
        change = orthogonalise(nesterov.reshape(-1, *shape[-2:])).reshape(len(params), *shape)
        scale = RMS_MATCH * max(shape[-2:]) ** 0.5 * group["lr"]
        for param, delta in zip(params, change.to(grads.dtype).unbind(), strict=True):
            param.mul_(1 - group["lr"] * group["decay"]).sub_(delta, alpha=scale)


def is_matrix(name: str, weight: Tensor) -> bool:
    """Whether Muon takes it: matrices inside layers, but neither the router nor the indexer."""
    inside = name.startswith("model.layers") and weight.dim() > 1
    return inside and "indexer" not in name and "mlp.gate.weight" not in name


def build(model: TinyDsa, lr: float, index_lr: float) -> list[torch.optim.Optimizer]:
    """The optimizers; each group's `peak` is the learning rate that the schedule scales."""
    named = list(model.named_parameters())
    matrices = [p for n, p in named if is_matrix(n, p)]
    indexer = [p for n, p in named if "indexer" in n]
    rest = [p for n, p in named if "indexer" not in n and not is_matrix(n, p)]
    adam = torch.optim.AdamW(
        [{"params": rest, "lr": lr}, {"params": indexer, "lr": index_lr}],
        betas=(0.9, 0.95),
        weight_decay=0.0,
        fused=next(model.parameters()).is_cuda,
    )
    optimizers = [Muon(matrices, lr, decay=0.05), adam]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers
