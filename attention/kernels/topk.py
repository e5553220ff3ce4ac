"""Exact top-k with a total order: the higher score first, at equal scores the lower position.

The order matters because ReLU makes exact zeros: which of many equal keys is attended to must not
depend on the library, the batch or the row's place in it. The order decides which positions are
in the set; the set is returned by ascending position, so that what is summed over it later is
summed in one order whatever the scores were.
"""

import torch
from torch import Tensor

# Below every score, NaN included.
OUTSIDE = torch.iinfo(torch.int64).min


def top_k(scores_TL: Tensor, visible_T: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The best min(k, visible) of the first visible_T[t] positions of each row: the definition.

    scores_TL: fp32; what stands behind the visible part is never looked at. Returns int64
    positions [T, k], ascending, -1 behind them, and how many there are [T]. -0.0 equals +0.0; NaN
    sorts last. Each score and its position make one int64 key, so no two keys are equal and
    torch.topk, which has no order among equals, has no choice.
    """
    length = scores_TL.shape[1]
    counts_T = visible_T.clamp(0, min(k, length))
    width = min(k, length)
    positions_TK = scores_TL.new_full((len(scores_TL), k), -1, dtype=torch.int64)
    if not width:
        return positions_TK, counts_T
    chosen_TK = _keys(scores_TL, visible_T).topk(width, dim=1).indices
    columns_K = torch.arange(width, device=scores_TL.device)
    outside_TK = columns_K >= counts_T.unsqueeze(1)
    # A stand-in above every position keeps the empty places behind.
    chosen_TK = chosen_TK.masked_fill(outside_TK, length).sort(dim=1).values
    positions_TK[:, :width] = chosen_TK.masked_fill(outside_TK, -1)
    return positions_TK, counts_T


def top_k_of_many(scores_TL: Tensor, visible_T: Tensor, k: int) -> Tensor:
    """`top_k` for L > k, int64 [T, k]; twice as fast where nearly all rows see more than k.

    scores_TL: fp32, -inf behind the visible part. The k-th best score is a threshold; where exactly
    k scores reach it the set is settled. Otherwise (a tie at the threshold, NaN, -inf, a row that
    sees fewer than k) all rows take the long way.
    """
    rows = len(scores_TL)
    threshold_T1 = scores_TL.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    # Row by row, and by ascending position within a row. NaN reaches nothing, not even itself.
    places_X2 = (scores_TL >= threshold_T1).nonzero()
    if len(places_X2) == rows * k:
        row_TK, position_TK = places_X2.view(rows, k, 2).unbind(2)
        # As many in all may still be more in one row and fewer in another.
        if rows == 1:
            return position_TK
        rows_T1 = torch.arange(rows, device=row_TK.device).unsqueeze(1)
        if bool((row_TK == rows_T1).all()):
            return position_TK
    return top_k(scores_TL, visible_T, k)[0]


def check_selection(positions_TK: Tensor, visible_T: Tensor) -> None:
    """Raise RuntimeError unless each row holds min(K, visible) ascending visible positions.

    A debugging aid: it reads the whole selection back to the host.
    """
    width = positions_TK.shape[1]
    counts_T = visible_T.clamp(0, width)
    inside_TK = torch.arange(width, device=positions_TK.device) < counts_T.unsqueeze(1)
    bad_T = ((positions_TK >= 0) != inside_TK).any(dim=1)
    bad_T |= (inside_TK & (positions_TK >= visible_T.unsqueeze(1))).any(dim=1)
    bad_T |= (inside_TK[:, 1:] & (positions_TK.diff(dim=1) <= 0)).any(dim=1)
    if bool(bad_T.any()):
        row = int(bad_T.nonzero()[0])
        raise RuntimeError(
            f"row {row} sees {int(visible_T[row])} keys and must select {int(counts_T[row])} "
            f"of them, each once and packed to the front, but holds {positions_TK[row].tolist()}"
        )


def _keys(scores_TL: Tensor, visible_T: Tensor) -> Tensor:
    """int64 that orders like (score, lower position): all different, hidden places last."""
    length = scores_TL.shape[1]
    # Negative floats have ascending bits where their values descend: flip all but the sign.
    # Adding 0.0 first turns -0.0 into +0.0.
    bits_TL = (scores_TL + 0.0).view(torch.int32)
    bits_TL = bits_TL ^ ((bits_TL >> 31) & 0x7FFFFFFF)
    lowest = torch.iinfo(torch.int32).min
    bits_TL = bits_TL.masked_fill(scores_TL.isnan(), lowest)
    positions_L = torch.arange(length, device=scores_TL.device)
    keys_TL = (bits_TL.to(torch.int64) << 32) | (0xFFFFFFFF - positions_L)
    return keys_TL.masked_fill(positions_L >= visible_T.unsqueeze(1), OUTSIDE)
