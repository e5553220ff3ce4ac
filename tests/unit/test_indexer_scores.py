"""Index scores: the ReLU per head before the weighted sum, and what scoring may cost."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attention_oracle as oracle
from attention_bed import INDEX_HEADS, TOPK, Bed, Chunk
from minidsa.attention.dense.torch_ref import TorchDenseBackend
from minidsa.attention.kernels.reference import index_scores
from minidsa.attention.sparse.dsa import DsaBackend


@pytest.mark.parametrize(("queries", "heads", "length"), [(1, 1, 1), (3, 4, 17), (5, 13, 130)])
def test_equals_the_formula(queries, heads, length):
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(2, queries, heads, 8, generator=generator)
    w = torch.randn(2, queries, heads, generator=generator)
    keys = torch.randn(2, length, 8, generator=generator)
    actual = index_scores(q, w, keys)
    assert actual.dtype == torch.float32 and actual.shape == (2, queries, length)
    for b in range(2):
        for j in range(queries):
            none = torch.empty(0)
            row = oracle.Row(none, none, q[b, j], w[b, j])
            expected = torch.tensor(oracle.scores(row, keys[b]))
            torch.testing.assert_close(actual[b, j], expected, rtol=1e-5, atol=1e-5)


def test_relu_is_per_head_and_before_the_sum():
    """Two heads that cancel: summed first they would score 0."""
    q = torch.tensor([[[[1.0], [-1.0]]]])
    w = torch.tensor([[[1.0, 1.0]]])
    keys = torch.tensor([[[2.0], [-3.0]]])
    assert index_scores(q, w, keys).tolist() == [[[2.0, 3.0]]]


def test_weights_may_be_negative_and_keys_may_be_rejected_by_all():
    q = torch.tensor([[[[1.0], [1.0]]]])
    w = torch.tensor([[[-2.0, -1.0]]])
    keys = torch.tensor([[[2.0], [-3.0]]])
    assert index_scores(q, w, keys).tolist() == [[[-6.0, 0.0]]]


def test_half_precision_keys_give_fp32_scores():
    generator = torch.Generator().manual_seed(1)
    q, keys = (torch.randn(1, n, 8, generator=generator) for n in (4, 50))
    w = torch.randn(1, 1, 4, generator=generator)
    q, keys = q.bfloat16().unsqueeze(1), keys.bfloat16()
    expected = index_scores(q.float(), w, keys.float())
    assert torch.equal(index_scores(q, w, keys), expected)


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        old = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, torch.Tensor):
                memory = tensor.untyped_storage()
                if memory.data_ptr() not in old:
                    self.bytes = max(self.bytes, memory.nbytes())
        return out


def selections(bed: Bed, chunks: list[Chunk], extends: int, workspace: int):
    """What each row of each part selects under a workspace, and the largest tensor on the way."""
    seen = []
    backend = DsaBackend(
        TorchDenseBackend(bed.storage),
        bed.storage,
        TOPK,
        workspace_bytes=workspace,
        on_select=lambda layer, positions, counts: seen.append((positions.clone(), counts)),
    )
    batch = bed.batch(chunks, extends)
    with LargestTensor() as largest:
        out = bed.attend(backend, backend.plan(batch), chunks)
    return seen, largest.bytes, out


CHUNKS = {
    "prefill": ([Chunk("a", 0, 450)], 1),
    "prefill after a prefix": ([Chunk("a", 350, 450)], 1),
    "decode": ([Chunk("a", 449, 450), Chunk("b", 349, 350)], 0),
    "verify": ([Chunk("a", 430, 450), Chunk("b", 330, 350)], 0),
    "mixed": ([Chunk("a", 300, 450), Chunk("b", 349, 350)], 1),
}


@pytest.mark.parametrize("case", CHUNKS)
@pytest.mark.parametrize("workspace", [1, 50_000, 150_000])
def test_ops_10_scores_stay_under_the_cap_with_the_same_ids(case, workspace):
    bed = Bed(index_heads=5, num_pages=500)
    bed.add("a", 450)
    bed.add("b", 350)
    chunks, extends = CHUNKS[case]
    expected, free, uncapped = selections(bed, chunks, extends, 1 << 30)
    actual, peak, out = selections(bed, chunks, extends, workspace)
    assert len(actual) == len(expected) == 1 + (case == "mixed")
    for (ids, counts), (expected_ids, expected_counts) in zip(actual, expected, strict=True):
        assert torch.equal(ids, expected_ids) and torch.equal(counts, expected_counts)
    torch.testing.assert_close(out, uncapped, rtol=1e-4, atol=1e-5)
    # One query, the queries and outputs of the step and its slots are there whatever the cap. The
    # products of a step are filled up to four rows and sixteen columns.
    tokens = -(-sum(c.stop - c.start for c in chunks) // 4) * 4
    floor = max(450 * (5 + 2) * 8, tokens * TOPK * 8, tokens * bed.heads * 16 * 4, 2 * 454 * 8)
    assert peak <= max(workspace, floor)
    assert free > max(workspace, floor) or case == "decode"


def test_ops_11_memory_is_flat_in_heads():
    peaks = []
    for heads in (1, 4, 16):
        bed = Bed(index_heads=heads, num_pages=500)
        bed.add("a", 1500)
        peaks.append(selections(bed, [Chunk("a", 1200, 1500)], 1, 400_000)[1])
    assert max(peaks) <= 400_000


def test_row_does_not_depend_on_its_company():
    """From four heads up a score has the same bits in every tile: chunk, verify or decode."""
    bed = Bed(num_pages=500)
    bed.add("a", 300)
    bed.add("b", 300)
    assert INDEX_HEADS == 4
    keys = bed.sequences["a"].index_k[0]
    q, w = bed.sequences["a"].index_q[0], bed.sequences["a"].index_w[0]
    whole = index_scores(q[None], w[None], keys[None])[0]
    for position in (20, 63, 64, 299):
        count = position + 1
        alone = index_scores(q[None, position:count], w[None, position:count], keys[None, :count])
        assert torch.equal(alone[0, 0], whole[position, :count])
