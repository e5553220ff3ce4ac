"""Exact top-k with a total order: the higher score first, at equal scores the lower position.

The order matters because ReLU makes exact zeros: which of many equal keys is attended to must not
depend on the library, the batch or the row's place in it.
"""

import torch
from torch import Tensor

HIDDEN = float("-inf")


def select(scores_TL: Tensor, counts_T: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The best min(k, counts_T[t]) of the first counts_T[t] positions of each row.

    scores_TL: fp32, overwritten outside the visible part. Returns int64 positions [T, k], the
    selected ones in front and -1 behind, and how many each row selected [T]. NaN sorts last.
    """
    length = scores_TL.shape[1]
    positions_L = torch.arange(length, device=scores_TL.device)
    hidden_TL = positions_L >= counts_T.unsqueeze(1)
    scores_TL.masked_fill_(hidden_TL, HIDDEN)
    chosen_T = counts_T.clamp(max=k)
    width = min(k, length)
    values_TK, positions_TK = scores_TL.topk(min(width + 1, length), dim=1)
    if _is_ambiguous(values_TK, chosen_T, width):
        positions_TK = _sortable(scores_TL, hidden_TL).topk(width, dim=1).indices
    positions_TK = positions_TK[:, :width]
    outside_TK = positions_L[:width] >= chosen_T.unsqueeze(1)
    packed_TK = torch.full((len(scores_TL), k), -1, device=scores_TL.device)
    packed_TK[:, :width] = positions_TK.masked_fill(outside_TK, -1)
    return packed_TK, chosen_T


def _is_ambiguous(values_TK: Tensor, chosen_T: Tensor, width: int) -> bool:
    """Whether torch.topk, which has no order among equals, may have chosen another set.

    It cannot have where the last value inside is above the first outside. NaN counts as greatest
    there, so it shows in the first place.
    """
    if bool(values_TK[:, 0].isnan().any()):
        return True
    last_T1 = (chosen_T - 1).clamp(min=0).unsqueeze(1)
    if bool((values_TK.gather(1, last_T1) == HIDDEN).logical_and(chosen_T.unsqueeze(1) > 0).any()):
        return True
    if values_TK.shape[1] == width:
        return False
    tied_T = values_TK[:, width - 1] == values_TK[:, width]
    return bool((tied_T & (values_TK[:, width] != HIDDEN)).any())


def _sortable(scores_TL: Tensor, hidden_TL: Tensor) -> Tensor:
    """int64 keys that order like (score, lower position): all different, hidden ones last."""
    length = scores_TL.shape[1]
    # + 0.0 turns -0.0 into +0.0; NaN goes below every number but above what is hidden.
    bits_TL = (scores_TL.nan_to_num(nan=HIDDEN, posinf=torch.inf, neginf=HIDDEN) + 0.0).view(
        torch.int32
    )
    ordered_TL = bits_TL ^ ((bits_TL >> 31) & 0x7FFFFFFF)
    ordered_TL = ordered_TL.to(torch.int64).masked_fill(scores_TL.isnan(), -(1 << 32))
    ordered_TL = ordered_TL.masked_fill(hidden_TL, -(1 << 33))
    later_L = torch.arange(length, device=scores_TL.device)
    return (ordered_TL << 29) - later_L
