"""Applies to logits what requests ask for beside the model: penalties, bias, masks, budgets.

What that is gets worked out on the host, for all rows of a step, and is handed to the device in a
few tensors. Nothing is ever asked of the device, so the host waits for nothing here.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from .inputs import to_device, to_tensor
from .sequence import SampleInput

Rows = Mapping[int, SampleInput]
"""Rows that ask for something, by their places among all."""
Changes = tuple[np.ndarray, np.ndarray]
"""int64 ids, and a float64 number for each."""


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
    rule: Callable[[SampleInput], Changes | None],
    apply: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Put apply(logit, number) for the logits that a rule has numbers for."""
    changes = {i: found for i, row in rows.items() if (found := rule(row)) is not None}
    if not changes:
        return
    places = [np.full(len(ids), i) for i, (ids, _) in changes.items()]
    tokens, numbers = zip(*changes.values(), strict=True)
    device = adjusted_NV.device
    rows_E, ids_E, numbers_E = (
        to_device(torch.from_numpy(np.concatenate(parts)), device)
        for parts in (places, tokens, numbers)
    )
    # A token that a row names twice has the same number both times.
    adjusted_NV[rows_E, ids_E] = apply(adjusted_NV[rows_E, ids_E], numbers_E)


def _repetition(row: SampleInput) -> Changes | None:
    """The penalty of each token that was seen."""
    penalty = row.params.repetition_penalty
    if penalty == 1.0:
        return None
    ids = np.concatenate([_ids(row.prompt_ids), _ids(row.output_ids)])
    return ids, np.full(len(ids), penalty)


def _repeat_less(logits_E: Tensor, penalties_E: Tensor) -> Tensor:
    return logits_E * torch.where(logits_E > 0, 1 / penalties_E, penalties_E).float()


def _count(row: SampleInput) -> Changes | None:
    """What each token that was generated loses."""
    frequency, presence = row.params.frequency_penalty, row.params.presence_penalty
    if not frequency and not presence:
        return None
    ids, counts = np.unique(_ids(row.output_ids), return_counts=True)
    return ids, frequency * counts + presence


def _bias(row: SampleInput) -> Changes | None:
    bias = row.params.logit_bias
    return (_ids(list(bias)), np.array(list(bias.values()), dtype=float)) if bias else None


def _ids(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


_RULES = (
    (_repetition, _repeat_less),
    (_count, lambda logits_E, losses_E: logits_E - losses_E.float()),
    (_bias, lambda logits_E, bias_E: logits_E + bias_E.float()),
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
