"""Cases of the indexer: scores of its keys, exact top-k, the two together.

Shapes of DeepSeek-V3.2: 64 index heads of 128, pages of 64 tokens, top-k 2048.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_cases import Case, Entry, Section, closeness, floor_us, worst
from benchmarks.peers import Peers
from minidsa.attention.kernels.fp8_rows import FP8, IndexPages
from minidsa.attention.kernels.indexer_logits import indexer_logits, query_groups
from minidsa.attention.kernels.indexer_logits_hopper import indexer_logits_hopper, suits
from minidsa.attention.kernels.topk_triton import select_top_k

HEADS, WIDTH, PAGE, TOPK = 64, 128, 64, 2048
PAIR_FLOP = 2 * HEADS * WIDTH
DEVICE = torch.device("cuda")


def random_fp8(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(FP8)


class Scoring:
    """Random index pages of `requests` contexts of `length`, and queries of the last tokens.

    A prefill is one request with many queries; its keys also lie one after the other, which is what
    a peer without pages reads.
    """

    def __init__(self, requests: int, queries: int, length: int) -> None:
        self.requests, self.length = requests, length
        num_pages = requests * length // PAGE
        pages_NX = torch.empty(num_pages, PAGE * (WIDTH + 4), dtype=torch.uint8, device=DEVICE)
        self.pages = IndexPages(pages_NX, PAGE)
        for first in range(0, num_pages, 8192):
            part = slice(first, first + 8192)
            values = self.pages.values_NPD[part]
            values.view(torch.uint8).copy_(random_fp8(*values.shape).view(torch.uint8))
            self.pages.scales_NP[part].uniform_(0.5, 1.5)
        order = torch.randperm(num_pages, device=DEVICE).to(torch.int32)
        self.table_BP = order.view(requests, length // PAGE)
        self.q_TnD = random_fp8(requests * queries, HEADS, WIDTH)
        self.weights_Tn = torch.randn(requests * queries, HEADS, device=DEVICE)
        ends = torch.arange(length - queries + 1, length + 1, dtype=torch.int32, device=DEVICE)
        self.visible_T = ends.repeat(requests)
        self.groups = query_groups([queries] * requests, HEADS, DEVICE)
        self.out_TL = torch.empty(requests * queries, length, device=DEVICE)
        self.pairs = int(self.visible_T.sum())

    def ours(self, kernel: Callable[..., Tensor] = indexer_logits) -> Tensor:
        return kernel(
            self.q_TnD,
            self.weights_Tn,
            self.pages,
            self.table_BP,
            self.groups,
            self.visible_T,
            self.out_TL,
        )

    def as_served(self) -> Tensor:
        """By the kernel that `select_keys` takes."""
        by_hand = suits(self.q_TnD, self.pages, self.groups)
        return self.ours(indexer_logits_hopper if by_hand else indexer_logits)

    def keys_of(self, request: int) -> tuple[Tensor, Tensor]:
        """Values [L, D] and scales [L] of a request, in order."""
        table_P = self.table_BP[request].long()
        values = self.pages.values_NPD.view(torch.uint8)[table_P].view(FP8)
        return values.flatten(0, 1), self.pages.scales_NP[table_P].flatten()

    def check(self, run: Callable[[], Tensor]) -> str:
        """Three rows against torch; ours must also leave what is hidden alone."""
        self.out_TL.fill_(float("nan"))
        out_TL = run()
        tokens = len(self.q_TnD)
        return worst(self._row(out_TL, row) for row in (0, tokens // 2, tokens - 1))

    def _row(self, out_TL: Tensor, row: int) -> str:
        values_LD, scales_L = self.keys_of(row * self.requests // len(self.q_TnD))
        dots_nL = torch.relu(self.q_TnD[row].float() @ values_LD.float().T)
        expected_L = (dots_nL * self.weights_Tn[row][:, None]).sum(0) * scales_L
        seen = int(self.visible_T[row])
        if out_TL is self.out_TL and not bool(out_TL[row, seen:].isnan().all()):
            return "wrong: wrote behind the visible part"
        return closeness(out_TL[row, :seen], expected_L[:seen], 1e-3)

    def entries(self, peers: Peers) -> Iterator[Entry]:
        yield Entry("minidsa", self.ours, partial(self.check, self.ours))
        if suits(self.q_TnD, self.pages, self.groups):
            by_hand = partial(self.ours, indexer_logits_hopper)
            yield Entry("minidsa, by hand", by_hand, partial(self.check, by_hand))
        peer = self.peer(peers)
        if peer:
            yield Entry("DeepGEMM", peer, partial(self.check, peer))

    def peer(self, peers: Peers) -> Callable[[], Tensor] | None:
        gemm: Any = peers.deep_gemm
        if gemm is None:
            return None
        if self.requests == 1 and len(self.q_TnD) > 8:
            values_LD, scales_L = (tensor.contiguous() for tensor in self.keys_of(0))
            start_T = torch.zeros_like(self.visible_T)
            return lambda: gemm.fp8_fp4_mqa_logits(
                (self.q_TnD, None),
                (values_LD, scales_L),
                self.weights_Tn,
                start_T,
                self.visible_T,
                clean_logits=False,
                logits_dtype=torch.float32,
            )
        lens_B1 = self.visible_T.view(self.requests, -1)
        q_BwnD = self.q_TnD.view(self.requests, -1, HEADS, WIDTH)
        plan = gemm.get_paged_mqa_logits_metadata(lens_B1, PAGE, gemm.get_num_sms())
        cache = self.pages.pages_NX.view(-1, PAGE, 1, WIDTH + 4)
        return lambda: gemm.fp8_fp4_paged_mqa_logits(
            (q_BwnD, None),
            cache,
            self.weights_Tn,
            lens_B1,
            self.table_BP,
            plan,
            self.length,
            clean_logits=False,
        )

    def floor(self) -> float:
        moved = self.requests * self.length * (WIDTH + 4) + self.pairs * 4
        return floor_us(moved, PAIR_FLOP * self.pairs, "fp8")


PREFILL = [(4096, 32768), (2048, 8192), (8192, 8192), (4096, 65536), (512, 131072), (64, 32768)]
DECODE = [(128, 32768), (1, 131072), (16, 32768), (32, 32768), (64, 32768), (128, 65536)]
VERIFY = [(64, 2, 32768), (32, 4, 32768)]


def logits(peers: Peers, quick: bool) -> Iterator[Case]:
    """Index scores: prefill of one request, paged decode, verify of a few tokens a request."""
    for queries, length in PREFILL[: 1 if quick else None]:
        work = Scoring(1, queries, length)
        shape = f"prefill {queries} x {length}"
        yield Case("logits", shape, work.floor(), list(work.entries(peers)))
    for requests, length in DECODE[: 2 if quick else None]:
        work = Scoring(requests, 1, length)
        shape = f"decode {requests} x {length}"
        yield Case("logits", shape, work.floor(), list(work.entries(peers)))
    for requests, queries, length in [] if quick else VERIFY:
        work = Scoring(requests, queries, length)
        shape = f"verify {requests} x {queries} x {length}"
        wanted = list(work.entries(peers))[: 2 if queries == 2 else 1]
        yield Case("logits", shape, work.floor(), wanted)


class Choosing:
    """Random scores of which each row's visible part is chosen from."""

    def __init__(self, rows: int, length: int, causal: bool) -> None:
        self.scores_TL = torch.randn(rows, length, device=DEVICE)
        first = length - rows + 1 if causal else length
        ends = torch.arange(first, first + rows) if causal else torch.full((rows,), length)
        self.visible_T = ends.to(torch.int32).to(DEVICE)
        self.visible_T[0] -= 37
        self.out_TK = torch.empty(rows, TOPK, dtype=torch.int32, device=DEVICE)

    def ours(self) -> Tensor:
        return select_top_k(self.scores_TL, self.visible_T, TOPK, out=self.out_TK)

    def check(self, run: Callable[[], object], ordered: bool) -> str:
        """Three rows: different visible positions whose scores are the best ones."""
        self.out_TK.fill_(-2)
        run()
        rows = len(self.out_TK)
        return worst(self._row(row, ordered) for row in (0, rows // 2, rows - 1))

    def _row(self, row: int, ordered: bool) -> str:
        seen = int(self.visible_T[row])
        if seen <= TOPK:
            return "ok"
        chosen_K = self.out_TK[row].long()
        distinct = len(chosen_K.unique()) == TOPK
        if not distinct or int(chosen_K.min()) < 0 or int(chosen_K.max()) >= seen:
            return "wrong: not positions that the row sees, each once"
        if ordered and not bool((chosen_K.diff() > 0).all()):
            return "wrong: positions are not ascending"
        best_K = self.scores_TL[row, :seen].topk(TOPK).values.sort().values
        equal = torch.equal(self.scores_TL[row][chosen_K].sort().values, best_K)
        return "ok exact" if equal else "wrong: other scores are higher"

    def entries(self, peers: Peers) -> Iterator[Entry]:
        yield Entry("minidsa", self.ours, lambda: self.check(self.ours, ordered=True))
        for name, choose in top_k_peers(peers, self.visible_T, self.out_TK).items():
            run = partial(choose, self.scores_TL)
            yield Entry(name, run, partial(self.check, run, ordered=False))
        yield Entry("torch.topk", self.library, lambda: "ok (whole rows)")

    def library(self) -> object:
        return torch.topk(self.scores_TL, TOPK, dim=-1, sorted=False)


def top_k_peers(
    peers: Peers, visible_T: Tensor, out_TK: Tensor
) -> dict[str, Callable[[Tensor], object]]:
    """Every peer's exact top-k of a score matrix; none orders its output."""
    rows = len(visible_T)
    ops: Any = torch.ops
    runs: dict[str, Callable[[Tensor], object]] = {}
    if peers.has("vllm"):
        space = torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE)
        start_T = torch.zeros_like(visible_T)
        if rows <= 32:
            runs["vLLM cooperative"] = lambda scores: ops._C.cooperative_topk(
                scores, visible_T, out_TK, space, TOPK, scores.shape[1]
            )
        runs["vLLM persistent"] = lambda scores: ops._C.persistent_topk(
            scores, visible_T, out_TK, space, TOPK, scores.shape[1]
        )
        runs["vLLM per row"] = lambda scores: ops._C.top_k_per_row_prefill(
            scores, start_T, visible_T, out_TK, rows, *scores.stride(), TOPK
        )
    if peers.has("sglang"):
        runs["SGLang fast_topk"] = lambda scores: ops.sgl_kernel.fast_topk(
            scores, out_TK, visible_T, None
        )
    return runs


CHOICES = [
    (128, 32768, False),
    (4096, 32768, True),
    (1, 131072, False),
    (1, 8192, False),
    (16, 32768, False),
    (64, 32768, False),
    (128, 131072, False),
    (8, 131072, False),
    (2048, 8192, True),
    (1, 1 << 20, False),
]


def topk(peers: Peers, quick: bool) -> Iterator[Case]:
    """Exact top-k of scores that are there already."""
    for rows, length, causal in CHOICES[: 3 if quick else None]:
        work = Choosing(rows, length, causal)
        floor = floor_us(4.0 * float(work.visible_T.sum()) + 4 * rows * TOPK)
        shape = f"{'prefill' if causal else 'decode'} {rows} x {length}"
        yield Case("topk", shape, floor, list(work.entries(peers)))


def select(peers: Peers, quick: bool) -> Iterator[Case]:
    """Scores and top-k one after the other, beside the quickest pair of peers."""
    shapes = [(1, 4096, 32768), (128, 1, 32768), (1, 512, 131072), (1, 1, 131072)]
    for requests, queries, length in shapes[: 2 if quick else None]:
        work = Scoring(requests, queries, length)
        out_TK = torch.empty(requests * queries, TOPK, dtype=torch.int32, device=DEVICE)

        def ours(work: Scoring = work, out_TK: Tensor = out_TK) -> object:
            return select_top_k(work.as_served(), work.visible_T, TOPK, out=out_TK)

        entries = [Entry("minidsa", ours, partial(work.check, work.as_served))]
        scores = work.peer(peers)
        if scores:
            for name, choose in top_k_peers(peers, work.visible_T, out_TK).items():
                entries.append(_pair(name, scores, choose, work))
        kind = "prefill" if requests == 1 and queries > 1 else "decode"
        shape = f"{kind} {max(requests, queries)} x {length}"
        yield Case("logits + topk", shape, work.floor(), entries)


def _pair(
    name: str,
    scores: Callable[[], Tensor],
    choose: Callable[[Tensor], object],
    work: Scoring,
) -> Entry:
    def run() -> object:
        return choose(scores())

    def check() -> str:
        run()
        return work.check(scores)

    return Entry(f"DeepGEMM + {name}", run, check)


SECTIONS: dict[str, Section] = {"topk": topk, "logits": logits, "select": select}
