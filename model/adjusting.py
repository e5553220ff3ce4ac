"""Applies to logits what requests ask for beside the model: penalties, bias, masks, budgets.

What that is gets worked out on the host, for all rows of a step, and is handed to the device in a
few tensors. Nothing is ever asked of the device, so the host waits for nothing here.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .inputs import to_device, to_tensor
from .sequence import SampleInput

Rows = Mapping[int, SampleInput]
"""Rows that ask for something, by their places among all."""


def adjust(logits_NV: Tensor, inputs: Sequence[SampleInput]) -> Tensor:
    """fp32 [N, vocabulary] as each row is to be chosen from; a copy, unless all rows are plain."""
    rows = {i: row for i, row in enumerate(inputs) if not row.is_plain}
    if not rows:
        return logits_NV
    adjusted_NV = logits_NV.clone(memory_format=torch.contiguous_format)
    for rule, apply in _RULES:
        _change(adjusted_NV, rows, rule, apply)
    # Last, so that no bias revives an id.
    _forbid(adjusted_NV, rows)
    return adjusted_NV


def _change(
    adjusted_NV: Tensor,
    rows: Rows,
    rule: Callable[[SampleInput], Mapping[int, float]],
    apply: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Put apply(logit, number) for the logits that a rule has numbers for."""
    numbers = {(i, token): number for i, row in rows.items() for token, number in rule(row).items()}
    if numbers:
        places_2E = to_tensor(list(zip(*numbers, strict=True)), adjusted_NV.device)
        numbers_E = to_tensor(list(numbers.values()), adjusted_NV.device, torch.float64)
        places = places_2E[0], places_2E[1]
        adjusted_NV[places] = apply(adjusted_NV[places], numbers_E)


def _repetition(row: SampleInput) -> Mapping[int, float]:
    """The penalty of each token that was seen."""
    penalty = row.params.repetition_penalty
    return {} if penalty == 1.0 else dict.fromkeys([*row.prompt_ids, *row.output_ids], penalty)


def _repeat_less(logits_E: Tensor, penalties_E: Tensor) -> Tensor:
    return logits_E * torch.where(logits_E > 0, 1 / penalties_E, penalties_E).float()


def _count(row: SampleInput) -> Mapping[int, float]:
    """What each token that was generated loses."""
    frequency, presence = row.params.frequency_penalty, row.params.presence_penalty
    if not frequency and not presence:
        return {}
    return {token: frequency * n + presence for token, n in Counter(row.output_ids).items()}


_RULES = (
    (_repetition, _repeat_less),
    (_count, lambda logits_E, losses_E: logits_E - losses_E.float()),
    (lambda row: row.params.logit_bias, lambda logits_E, bias_E: logits_E + bias_E.float()),
)


def _forbid(adjusted_NV: Tensor, rows: Rows) -> None:
    """-inf for every id that may not come."""
    vocab, device = adjusted_NV.shape[1], adjusted_NV.device
    masks = {i: mask for i, row in rows.items() if (mask := _mask(row, -(-vocab // 8))) is not None}
    if not masks:
        return
    packed_M = torch.frombuffer(bytearray(b"".join(masks.values())), dtype=torch.uint8)
    packed_MX1 = to_device(packed_M, device).view(len(masks), -1, 1)
    bits_MX8 = packed_MX1 >> torch.arange(8, dtype=torch.uint8, device=device) & 1
    allowed_MV = bits_MX8.flatten(1)[:, :vocab].bool()
    rows_M = to_tensor(list(masks), device)
    adjusted_NV[rows_M] = adjusted_NV[rows_M].masked_fill(~allowed_MV, float("-inf"))


def _mask(row: SampleInput, num_bytes: int) -> bytes | None:
    """The ids that may come, one bit each, lowest bit first; None: all of them.

    Ids that a grammar's mask does not reach may not. Stop ids before the minimum are its business.
    """
    forced, stops = row.forced_token, row.params.stop_token_ids
    if row.constraint is not None:
        mask = row.constraint.mask()[:num_bytes].ljust(num_bytes, b"\0")
        # A grammar lets thoughts end between characters only.
        if forced is None or not mask[forced >> 3] >> (forced & 7) & 1:
            return mask
    if forced is not None:
        return (1 << forced).to_bytes(num_bytes, "little")
    if len(row.output_ids) >= row.params.min_tokens or not stops:
        return None
    ruled = bytearray(b"\xff" * num_bytes)
    for token in stops:
        ruled[token >> 3] &= ~(1 << (token & 7))
    return bytes(ruled)
