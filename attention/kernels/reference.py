"""Plain torch arithmetic of latent attention and of the lightning indexer.

These are the definitions every kernel is held to; the batched ones also serve on a CPU. The
formulas are those of DeepSeek-V2 (MLA) and DeepSeek-V3.2-Exp (indexer). Softmax, log-sum-exp
(natural logarithm) and scores are fp32 whatever the cache holds.

Places that a query does not see are masked, but 0 * NaN is NaN: where a function says so, callers
fill such places with rows that the request owns; the others never let them reach a product.

On a CPU `absorbed_query`, `latent_attention`, `unabsorb` and `index_scores` give a query the same
bits in any company: alone or in a batch, decoded or in a prompt chunk, with more or fewer hidden
keys behind those it sees. The BLAS computes rows four by four, and a rest of fewer in another
order; so it does with fewer than 12 columns, and so does torch with few multiplications. Products
are therefore filled up, to a multiple of ROWS and to `_fewest` columns. What a query's keys
contribute is summed in blocks of BLOCK keys, and a hidden key contributes an exact 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

HIDDEN = float("-inf")
BLOCK = 64
ROWS = 4
FEWEST_COLUMNS = 16
# A sum of many blocks takes ROWS rows of so many columns in one order, a rest in another.
WHOLE_WIDTH = 16
# Below so many multiplications torch takes a loop of its own instead of the BLAS.
SMALL_PRODUCT = 400


def absorbed_query(nope_THN: Tensor, rope_THR: Tensor, w_uk_HNC: Tensor, scale: float) -> Tensor:
    """scale * (W_UK,h^T q_h, rope_h): queries against latent rows, [T, H, C + R].

    scale is (N + R)^-0.5 and YaRN's correction, not (C + R)^-0.5. Any float dtype, kept. With an
    empty w_uk_HNC nope_THN is the result already, whole and scaled.
    """
    if not w_uk_HNC.shape[1]:
        return nope_THN
    latent_HTC = _per_head(nope_THN, w_uk_HNC)
    return torch.cat((latent_HTC.transpose(0, 1), rope_THR), dim=-1).mul_(scale)


def unabsorb(latent_THC: Tensor, w_uv_HVC: Tensor) -> Tensor:
    """Attended latents moved out to values: W_UV,h latent_h, [T, H, V].

    With an empty w_uv_HVC they stay latents, [T, H, C].
    """
    if not w_uv_HVC.shape[1]:
        return latent_THC
    return _per_head(latent_THC, w_uv_HVC.transpose(1, 2)).transpose(0, 1)


def _per_head(x_THD: Tensor, w_HDE: Tensor) -> Tensor:
    """Each head's rows times its own matrix, [H, T, E]."""
    if x_THD.device.type != "cpu":
        return torch.bmm(x_THD.transpose(0, 1), w_HDE)
    tokens, width = len(x_THD), w_HDE.shape[2]
    if tokens % ROWS:
        # Copies of a row fill up as well as zeros, and take one operation instead of four.
        x_THD = torch.cat((x_THD, *[x_THD[:1]] * (-tokens % ROWS)))
    if (missing := _fewest(x_THD.shape[2]) - width) > 0:
        w_HDE = F.pad(w_HDE, (0, missing))
    return torch.bmm(x_THD.transpose(0, 1), w_HDE)[:, :tokens, :width]


def _fewest(terms: int) -> int:
    """Columns from which on a product of ROWS rows, each a sum of so many terms, is the BLAS's."""
    return max(FEWEST_COLUMNS, -(-SMALL_PRODUCT // (ROWS * terms)))


def _filled(x_BQX: Tensor) -> Tensor:
    """x_BQX with rows of zeros behind it, up to a multiple of ROWS."""
    missing = -x_BQX.shape[1] % ROWS
    return F.pad(x_BQX, (0, 0, 0, missing)) if missing else x_BQX


def _unfilled(x_BQX: Tensor, queries: int) -> Tensor:
    """The first `queries` rows of what came of filled ones."""
    return x_BQX if x_BQX.shape[1] == queries else x_BQX[:, :queries]


def latent_attention(
    q_BQX: Tensor, rows_BLX: Tensor, hidden_BwX: Tensor | None, latent_width: int
) -> Tensor:
    """softmax(q . row) applied to the latent part of the rows: [B, Q, C] in the rows' dtype.

    q_BQX: absorbed queries, X = C + R; the Q queries of a batch entry are those of w tokens with
    Q / w heads, and share its L rows. Rows are copied unless L is a multiple of BLOCK.
    hidden_BwX: bool, for the last X rows of each token; True where it does not see a row, which
    must be finite all the same. Who sees nothing becomes NaN: callers set it to zero.
    """
    queries, length = q_BQX.shape[1], rows_BLX.shape[1]
    rows, q_BQX = rows_BLX.float(), q_BQX.float()
    if length % BLOCK:
        rows = F.pad(rows, (0, 0, 0, -length % BLOCK))
    scores_BQL = _unfilled(torch.bmm(_filled(q_BQX), rows.transpose(1, 2)), queries)
    if length % BLOCK:
        scores_BQL[..., length:] = HIDDEN
    if hidden_BwX is not None:
        _, tokens, count = hidden_BwX.shape
        scores_BwHL = scores_BQL.unflatten(1, (tokens, -1))[..., length - count : length]
        scores_BwHL.masked_fill_(hidden_BwX.unsqueeze(2), HIDDEN)
    weights_BQL = torch.softmax(scores_BQL, dim=-1)
    return _weighted_sums(weights_BQL, rows.narrow(2, 0, latent_width)).to(rows_BLX.dtype)


def _weighted_sums(weights_BQL: Tensor, values_BLC: Tensor) -> Tensor:
    """weights @ values, [B, Q, C], block by block of L; the blocks' results are summed in order."""
    batch, queries, length = weights_BQL.shape
    if rest := values_BLC.shape[2] % WHOLE_WIDTH:
        filled_BLC = F.pad(values_BLC, (0, WHOLE_WIDTH - rest))
        return _weighted_sums(weights_BQL, filled_BLC)[..., : values_BLC.shape[2]]
    weights_BQL = _filled(weights_BQL)
    if length == BLOCK:
        return _unfilled(torch.bmm(weights_BQL, values_BLC), queries)
    weights_XQL = weights_BQL.unflatten(2, (-1, BLOCK)).transpose(1, 2).flatten(0, 1)
    values_XLC = values_BLC.unflatten(1, (-1, BLOCK)).flatten(0, 1)
    blocks_XQC = torch.bmm(weights_XQL, values_XLC)
    return _unfilled(blocks_XQC.view(batch, -1, *blocks_XQC.shape[1:]).sum(dim=1), queries)


def sparse_attention(
    q_THX: Tensor, rows_SX: Tensor, slots_TK: Tensor, counts_T: Tensor, latent_width: int
) -> tuple[Tensor, Tensor]:
    """Absorbed attention of each query over its own slots: (fp32 [T, H, C], LSE fp32 [T, H]).

    An entry counts when its column is below counts_T[t] and its slot is not negative; other
    entries may hold anything and are never read. A query with no entry gives zeros and -inf.
    rows_SX: the cache of one layer. Twin of the sparse decode and prefill kernels.
    """
    columns_K = torch.arange(slots_TK.shape[1], device=slots_TK.device)
    valid_TK = (columns_K < counts_T.unsqueeze(1)) & (slots_TK >= 0)
    rows_TKX = rows_SX[slots_TK.where(valid_TK, 0).long()].float()
    # Slot 0 stands in for entries that do not count; it may hold NaN and must not reach a product.
    rows_TKX = rows_TKX.masked_fill(~valid_TK.unsqueeze(-1), 0.0)
    scores_THK = torch.einsum("thx,tkx->thk", q_THX.float(), rows_TKX)
    scores_THK = scores_THK.masked_fill(~valid_TK.unsqueeze(1), HIDDEN)
    weights_THK, lse_TH = _softmax_lse(scores_THK)
    out_THC = torch.einsum("thk,tkc->thc", weights_THK, rows_TKX[..., :latent_width])
    # A query of padding may be NaN itself.
    empty_T = ~valid_TK.any(dim=1)
    out_THC = out_THC.masked_fill(empty_T[:, None, None], 0.0)
    return out_THC, lse_TH.masked_fill(empty_T.unsqueeze(1), HIDDEN)


def expanded_attention(
    q_HTX: Tensor, k_HLX: Tensor, v_HLV: Tensor, visible_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention over expanded keys with its log-sum-exp: fp32 [H, T, V] and [H, T].

    q_HTX: queries with the softmax scale folded in, X = N + R. visible_T: how many of the L keys
    each query sees, 0 or less for none; None: all. A query that sees none gets zeros and -inf.
    Every key and value must be finite. v may be any slice: strides are honoured.
    """
    scores_HTL = torch.bmm(q_HTX.float(), k_HLX.float().transpose(1, 2))
    if visible_T is not None:
        keys_L = torch.arange(k_HLX.shape[1], device=k_HLX.device)
        scores_HTL.masked_fill_(keys_L >= visible_T.unsqueeze(-1), HIDDEN)
    weights_HTL, lse_HT = _softmax_lse(scores_HTL)
    return torch.bmm(weights_HTL, v_HLV.float()), lse_HT


def _softmax_lse(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension and its log-sum-exp; nothing visible: zeros and -inf."""
    if not scores.shape[-1]:
        return scores, scores.new_full(scores.shape[:-1], HIDDEN)
    lse = torch.logsumexp(scores, dim=-1)
    # -inf - -inf is NaN: a query without keys subtracts a finite number and weighs every key 0.
    floor = torch.finfo(torch.float32).min
    return torch.exp(scores - lse.clamp_min(floor).unsqueeze(-1)), lse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

    out: [..., V], lse: [...] natural log. Two empty sides give zeros and -inf, never NaN.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.clamp_min(torch.finfo(lse.dtype).min)
    share_a = torch.exp(lse_a - base).unsqueeze(-1).to(out_a.dtype)
    share_b = torch.exp(lse_b - base).unsqueeze(-1).to(out_b.dtype)
    return out_a * share_a + out_b * share_b, lse


def index_scores(q_BQnD: Tensor, weights_BQn: Tensor, *keys: Tensor) -> Tensor:
    """The indexer's scores, fp32 [B, Q, L]: sum_n w_n * relu(q_n . k).

    The ReLU is per head and comes before the weighted sum; weights may be negative. The Q queries
    of a batch entry share its L keys, given as one or more pieces [B, L_i, D] in order.
    Workspace: B * Q * n * L fp32, and as much again for several pieces.
    """
    batch, queries, heads, width = q_BQnD.shape
    q_BXD = q_BQnD.reshape(batch, queries * heads, width).float()
    lengths = [keys_BLD.shape[1] for keys_BLD in keys]
    length = sum(lengths)
    # The product with the keys is one for each piece, that with the weights of the heads is whole.
    fewest = max(_fewest(heads), _fewest(width))
    if length < fewest or min(lengths) < _fewest(width):
        keys = (F.pad(torch.cat(keys, dim=1), (0, 0, 0, max(0, fewest - length))),)
    q_BXD = _filled(q_BXD)
    pieces = [torch.bmm(q_BXD, keys_BLD.float().transpose(1, 2)) for keys_BLD in keys]
    dots_BXL = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
    dots_BXL = _unfilled(dots_BXL, queries * heads)
    dots_XnL = dots_BXL.relu_().reshape(batch * queries, heads, -1)
    # A single row of weights, ROWS times; repeated in memory, because the BLAS takes a batch of
    # matrices one by one where rows share their memory.
    weights_X1n = weights_BQn.reshape(batch * queries, 1, heads).float()
    scores_XRL = torch.bmm(torch.cat([weights_X1n] * ROWS, dim=1), dots_XnL)
    scores_XL = scores_XRL.select(1, 0).narrow(1, 0, length)
    return scores_XL.view(batch, queries, length)


def slots_of_positions(positions_TK: Tensor, table_TP: Tensor, page_size: int) -> Tensor:
    """Cache slots (page * page_size + offset) of positions in a request, int64 [T, K]; -1 stays.

    table_TP: int32 or int64 pages of each row's request. Raises TypeError for another dtype and
    ValueError for another rank or a position past the table.
    """
    for tensor in (positions_TK, table_TP):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"positions and pages are int32 or int64, got {tensor.dtype}")
        if tensor.dim() != 2:
            raise ValueError(f"positions and pages have 2 dimensions, got {tensor.dim()}")
    limit = table_TP.shape[1] * page_size
    if bool((positions_TK >= limit).any()):
        raise ValueError(f"a position is past the {limit} tokens of the block table")
    places_TK = positions_TK.long().clamp(min=0)
    pages_TK = table_TP.long().gather(1, places_TK // page_size)
    slots_TK = pages_TK * page_size + places_TK % page_size
    return slots_TK.masked_fill(positions_TK < 0, -1)


def paged_index_scores(
    q_TnD: Tensor,
    weights_Tn: Tensor,
    keys_SD: Tensor,
    slots_TL: Tensor,
    visible_T: Tensor,
) -> Tensor:
    """Index scores of each query over its own slots: fp32 [T, L], -inf from visible_T[t] on.

    keys_SD: fp32 keys of all slots, dequantised; slots_TL: those of each query's request in order,
    where anything may stand from visible_T[t] on. Twin of the index score kernels.
    """
    hidden_TL = torch.arange(slots_TL.shape[1], device=slots_TL.device) >= visible_T.unsqueeze(1)
    keys_TLD = keys_SD[slots_TL.masked_fill(hidden_TL, 0)]
    scores_TL = index_scores(q_TnD.unsqueeze(1), weights_Tn.unsqueeze(1), keys_TLD).squeeze(1)
    return scores_TL.masked_fill(hidden_TL, HIDDEN)
