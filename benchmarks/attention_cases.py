"""Cases of latent attention: sparse and dense decode, sparse prefill.

Shapes of DeepSeek-V3.2: rows of 512 + 64, top-k 2048, pages of 64 tokens; 128 heads, and the 32 and
16 that a rank sees under tensor parallelism. FlashMLA takes 64 or 128 heads: fewer are padded.
Ours is timed with several tilings, so that one run on a GPU says which to choose.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_cases import Case, Entry, Section, closeness, floor_us, worst
from benchmarks.peers import Peers
from benchmarks.reading import reading
from minidsa.attention.kernels.fp8_rows import Fp8LatentRows, new_fp8_latent_rows
from minidsa.attention.kernels.launch import Tiling
from minidsa.attention.kernels.mla_decode import DecodeParts, decode_tiling, mla_decode
from minidsa.attention.kernels.reference import sparse_attention
from minidsa.attention.kernels.sparse_mla import sparse_mla, sparse_tiling

LATENT, ROPE, PAGE, TOPK = 512, 64, 64, 2048
WIDTH = LATENT + ROPE
SCALE = WIDTH**-0.5
PAIR_FLOP = 2 * (WIDTH + LATENT)
DEVICE = torch.device("cuda")
# FlashMLA rounds its own way, and fp8 rows are multiplied in fp16 here, in bf16 there.
TOLERANCE = 1e-2

Attended = Callable[[], tuple[Tensor, Tensor]]


def random_rows(count: int) -> Tensor:
    """bf16 [count, 576], a third of the normal distribution, made piece by piece."""
    rows_SX = torch.empty(count, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    for first in range(0, count, 1 << 18):
        rows_SX[first : first + (1 << 18)].normal_(0, 1 / 3)
    return rows_SX


def in_fp8(rows_SX: Tensor) -> Fp8LatentRows:
    """Scales are powers of two: FlashMLA rounds others to bf16."""
    rows = new_fp8_latent_rows(len(rows_SX), LATENT, ROPE, DEVICE)
    for first in range(0, len(rows_SX), 1 << 18):
        slots_T = torch.arange(first, min(first + (1 << 18), len(rows_SX)), device=DEVICE)
        latent_TC, rope_TR = rows_SX[slots_T].split((LATENT, ROPE), dim=1)
        rows.write(slots_T, latent_TC, rope_TR, power_of_two=True)
    return rows


def row_bytes(is_fp8: bool) -> int:
    return LATENT + 4 * LATENT // 128 + 2 * ROPE if is_fp8 else 2 * WIDTH


def padded_heads(q_THX: Tensor) -> Tensor:
    """With zeros for the heads that FlashMLA needs on top."""
    heads = q_THX.shape[1]
    wanted = 64 if heads <= 64 else 128
    return torch.nn.functional.pad(q_THX, (0, 0, 0, wanted - heads))


class Sparse:
    """Queries that each attend to 2048 random slots of a context of their own or a shared one."""

    def __init__(self, tokens: int, heads: int, length: int, contexts: int, is_fp8: bool) -> None:
        self.is_fp8 = is_fp8
        plain_SX = random_rows(contexts * length)
        self.fp8 = in_fp8(plain_SX) if is_fp8 else None
        self.rows_SX = plain_SX if self.fp8 is None else self.fp8.rows_SX
        self.q_THX = torch.randn(tokens, heads, WIDTH, device=DEVICE).bfloat16()
        self.scaled_THX = self.q_THX * SCALE
        chosen = [torch.rand(length, device=DEVICE).topk(TOPK).indices for _ in range(contexts)]
        slots_CK = torch.stack([own + c * length for c, own in enumerate(chosen)])
        if contexts == 1:
            slots_CK = torch.randint(length, (tokens, TOPK), device=DEVICE)
        # Both kinds of entry that do not count: behind the count, and holes.
        self.slots_TK = slots_CK.int().contiguous()
        self.slots_TK[0, -100:] = -1
        self.counts_T = torch.full((tokens,), TOPK, dtype=torch.int32, device=DEVICE)

    def ours(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        inputs = (self.scaled_THX, self.rows_SX, self.slots_TK, self.counts_T, LATENT)
        return sparse_mla(*inputs, tiling=tiling)

    def flash_decode(self) -> Attended:
        """FlashMLA's decode over fp8 rows; its plan is made by the first call."""
        q_BQHX = padded_heads(self.q_THX).unsqueeze(1).contiguous()
        cache = self.rows_SX.view(-1, PAGE, 1, row_bytes(True))
        slots_B1K, plan = self.slots_TK.unsqueeze(1), [None, None]
        heads = self.q_THX.shape[1]
        op: Any = torch.ops._flashmla_C.sparse_decode_fwd

        def run() -> tuple[Tensor, Tensor]:
            out, lse, *plan[:] = op(
                q_BQHX, cache, slots_B1K, None, None, *plan, None, None, None, LATENT, SCALE, None
            )
            return out[:, 0, :heads], lse[:, :heads, 0]

        return run

    def flash_prefill(self) -> Attended:
        q_THX, rows_S1X = padded_heads(self.q_THX), self.rows_SX.unsqueeze(1)
        slots_T1K, heads = self.slots_TK.unsqueeze(1), self.q_THX.shape[1]
        op: Any = torch.ops._flashmla_C.sparse_prefill_fwd

        def run() -> tuple[Tensor, Tensor]:
            out, _, lse = op(q_THX, rows_S1X, slots_T1K, SCALE, LATENT, None, None, None)
            return out[:, :heads], lse[:, :heads]

        return run

    def check(self, run: Attended) -> str:
        """Three queries against the twin."""
        out_THC, lse_TH = run()
        tokens = len(self.q_THX)
        at_T = torch.tensor([0, tokens // 2, tokens - 1], device=DEVICE)
        slots_TK = self.slots_TK[at_T]
        rows_SX = self.rows_SX
        if self.fp8 is not None:
            rows_SX = self.fp8.read(slots_TK.clamp(min=0).long().flatten())
            places = torch.arange(slots_TK.numel(), device=DEVICE).view_as(slots_TK)
            slots_TK = places.masked_fill(slots_TK < 0, -1)
        inputs = (self.scaled_THX[at_T], rows_SX, slots_TK, self.counts_T[at_T], LATENT)
        return compare(out_THC[at_T], lse_TH[at_T], *sparse_attention(*inputs))

    def floor(self) -> float:
        tokens, heads = self.q_THX.shape[:2]
        moved = tokens * (TOPK * row_bytes(self.is_fp8) + heads * 2 * (WIDTH + LATENT))
        return floor_us(moved, tokens * heads * TOPK * PAIR_FLOP)

    def entries(self, peer: Attended | None, others: Sequence[Tiling]) -> Iterator[Entry]:
        tokens, heads, _ = self.q_THX.shape
        usual = sparse_tiling(tokens, heads, self.rows_SX, LATENT)
        yield from tiled(lambda tiling: partial(self.ours, tiling), self.check, usual, others)
        if peer is not None:
            yield Entry("FlashMLA", peer, partial(self.check, peer))


class Dense:
    """Requests of equal length on scattered pages, with one query or a few each."""

    def __init__(self, requests: int, width: int, heads: int, length: int) -> None:
        self.requests, self.width, self.length = requests, width, length
        self.rows_SX = random_rows(requests * length)
        order = torch.randperm(requests * length // PAGE, device=DEVICE).int()
        self.table_BP = order.view(requests, -1)
        self.q_THX = torch.randn(requests * width, heads, WIDTH, device=DEVICE).bfloat16()
        self.scaled_THX = self.q_THX * SCALE

    def ours(self, tiling: Tiling) -> Attended:
        rows = self.width * self.q_THX.shape[1]
        parts = DecodeParts.of([self.length] * self.requests, rows, tiling, DEVICE)
        inputs = (self.scaled_THX, self.rows_SX, self.table_BP, PAGE, parts, LATENT)
        return lambda: mla_decode(*inputs)

    def flash(self) -> Attended:
        shape = (self.requests, self.width, *self.q_THX.shape[1:])
        q_BQHX, cache = self.q_THX.view(shape), self.rows_SX.view(-1, PAGE, 1, WIDTH)
        lens_B = torch.full((self.requests,), self.length, dtype=torch.int32, device=DEVICE)
        plan: list[Any] = [None, None]
        op: Any = torch.ops._flashmla_C.dense_decode_fwd

        def run() -> tuple[Tensor, Tensor]:
            out, lse, *plan[:] = op(
                q_BQHX, cache, LATENT, lens_B, self.table_BP, SCALE, True, *plan, None
            )
            return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

        return run

    def check(self, run: Attended) -> str:
        """The first and the last query against the twin."""
        out_THC, lse_TH = run()
        return worst(self._row(out_THC, lse_TH, row) for row in (0, len(self.q_THX) - 1))

    def _row(self, out_THC: Tensor, lse_TH: Tensor, row: int) -> str:
        pages_P = self.table_BP[row // self.width].long()
        positions = torch.arange(self.length, device=DEVICE)
        slots_1K = (pages_P[positions // PAGE] * PAGE + positions % PAGE).unsqueeze(0)
        seen = self.length - self.width + row % self.width + 1
        counts_1 = torch.tensor([seen], device=DEVICE)
        one = slice(row, row + 1)
        inputs = (self.scaled_THX[one], self.rows_SX, slots_1K, counts_1, LATENT)
        return compare(out_THC[one], lse_TH[one], *sparse_attention(*inputs))

    def floor(self) -> float:
        rows = len(self.q_THX) * self.q_THX.shape[1]
        moved = self.requests * self.length * row_bytes(False) + rows * 2 * (WIDTH + LATENT)
        return floor_us(moved, rows * self.length * PAIR_FLOP)

    def entries(self, peers: Peers, others: Sequence[Tiling]) -> Iterator[Entry]:
        usual = decode_tiling(self.width * self.q_THX.shape[1], self.rows_SX, LATENT)
        yield from tiled(self.ours, self.check, usual, others)
        if peers.has("flashmla"):
            peer = self.flash()
            yield Entry("FlashMLA", peer, partial(self.check, peer))


def tiled(
    make: Callable[[Tiling], Attended],
    check: Callable[[Attended], str],
    usual: Tiling,
    others: Sequence[Tiling],
) -> Iterator[Entry]:
    """Ours as it is chosen, and under each of the other tilings."""
    ours = make(usual)
    yield Entry("minidsa", ours, partial(check, ours))
    for other in others:
        if other != usual:
            name = f"minidsa {other.rows}x{other.keys}/{other.group} w{other.num_warps}"
            run_other = make(other)
            yield Entry(f"{name} s{other.num_stages}", run_other, partial(check, run_other))


def compare(out: Tensor, lse: Tensor, expected: Tensor, expected_lse: Tensor) -> str:
    return worst([closeness(lse, expected_lse, 1e-3), closeness(out, expected, TOLERANCE)])


def tilings(heads: int, is_fp8: bool) -> list[Tiling]:
    """What is worth a try: all compile for sm_90 without spills."""
    if heads > 32:
        groups = (128,) if is_fp8 else (512, 256)
        return [Tiling(64, keys, g, 8, s, 1) for g in groups for keys, s in ((64, 2), (32, 3))]
    rows, group = (16, 32)[heads > 16], 128 if is_fp8 else 512
    small = [Tiling(rows, 32, group, 8, 3, 1)]
    if heads <= 16:
        small += [Tiling(rows, 64, group, 8, 3, 1), Tiling(rows, 32, group, 4, 3, 2)]
    return [*small, Tiling(rows, 64, group, 8, 4, 1)]


DECODE = [(1, 128), (8, 128), (64, 128), (128, 128), (8, 16), (64, 16), (8, 32), (64, 32)]
PREFILL = [(4096, 128, 32768), (512, 128, 32768), (64, 128, 32768), (4096, 64, 32768)]
DENSE = [(128, 1, 128, 32768), (128, 1, 16, 8192), (128, 1, 128, 4096), (128, 2, 128, 8192)]
LONGEST = (1, 1, 128, 131072)


def sparse_decode(peers: Peers, quick: bool) -> Iterator[Case]:
    """One query a request over contexts of 32k; the peer has fp8 rows in both cases."""
    for requests, heads in DECODE:
        # The peer's time over fp8 rows is the goal for bf16 rows too: it comes with the fp8 case.
        for is_fp8 in (True, False):
            work = Sparse(requests, heads, 32768, requests, is_fp8)
            peer = work.flash_decode() if is_fp8 and peers.has("flashmla") else None
            shape = f"{requests} x {heads} heads, {'fp8' if is_fp8 else 'bf16'} rows"
            others = [] if quick else tilings(heads, is_fp8)
            entries = list(work.entries(peer, others))
            if heads <= 32:
                entries += reading(work.rows_SX, work.slots_TK.clamp(min=0))
            yield Case("sparse decode", shape, work.floor(), entries)


def sparse_prefill(peers: Peers, quick: bool) -> Iterator[Case]:
    """Queries of one prompt, each with slots of its own, bf16 rows."""
    for tokens, heads, length in PREFILL[: 1 if quick else None]:
        work = Sparse(tokens, heads, length, 1, is_fp8=False)
        peer = work.flash_prefill() if peers.has("flashmla") else None
        shape = f"{tokens} over {length}, {heads} heads"
        others = [] if quick else tilings(heads, False)
        yield Case("sparse prefill", shape, work.floor(), list(work.entries(peer, others)))


def dense_decode(peers: Peers, quick: bool) -> Iterator[Case]:
    """All keys of a request, bf16 rows; a verify step brings two tokens a request."""
    for requests, width, heads, length in DENSE[:2] if quick else [*DENSE, LONGEST]:
        work = Dense(requests, width, heads, length)
        shape = f"{requests} x {width} x {length}, {heads} heads"
        others = [] if quick else tilings(width * heads, False)
        yield Case("dense decode", shape, work.floor(), list(work.entries(peers, others)))


SECTIONS: dict[str, Section] = {
    "sparse_decode": sparse_decode,
    "sparse_prefill": sparse_prefill,
    "dense_decode": dense_decode,
}
