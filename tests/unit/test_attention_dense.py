"""The dense backend against the definition: paged decode, verify, chunked ragged prefill."""

import pytest
import torch

from attention_bed import Bed, Chunk, assert_close
from minidsa.attention.base import AttentionBackend
from minidsa.attention.dense.torch_ref import TorchDenseBackend
from minidsa.attention.sparse.dsa import DsaBackend


def bed_of(*lengths: int, **kwargs) -> Bed:
    bed = Bed(**kwargs)
    for i, length in enumerate(lengths):
        bed.add(f"r{i}", length)
    return bed


def ends(*lengths: int, width: int = 1) -> list[Chunk]:
    """The last `width` tokens of each sequence."""
    return [Chunk(f"r{i}", length - width, length) for i, length in enumerate(lengths)]


@pytest.mark.parametrize("page_size", [1, 3, 4, 16, 64])
@pytest.mark.parametrize("lengths", [(1,), (64,), (5, 64, 1, 33), (16, 16)])
def test_decode(page_size, lengths):
    bed = bed_of(*lengths, page_size=page_size)
    out = bed.step(TorchDenseBackend(bed.storage), ends(*lengths))
    assert_close(out, bed.expected(ends(*lengths)))


@pytest.mark.parametrize("width", range(1, 7))
def test_verify_rows_are_causal_among_themselves(width):
    lengths = (width, 30, 300, width + 1)
    bed = bed_of(*lengths)
    chunks = ends(*lengths, width=width)
    out = bed.step(TorchDenseBackend(bed.storage), chunks)
    assert_close(out, bed.expected(chunks))
    single = TorchDenseBackend(bed.storage)
    for j in range(width):
        one = [Chunk(c.name, c.start + j, c.start + j + 1) for c in chunks]
        assert_close(bed.step(single, one), out.view(4, width, *out.shape[1:])[:, j])


@pytest.mark.parametrize("workspace", [1, 2000, 20_000, 1 << 22])
@pytest.mark.parametrize("width", [1, 3])
def test_decode_under_a_workspace(workspace, width):
    lengths = (700, 9, 650, 300, 20, 640)
    bed = bed_of(*lengths, num_pages=700)
    chunks = ends(*lengths, width=width)
    backend = TorchDenseBackend(bed.storage, workspace_bytes=workspace)
    assert_close(bed.step(backend, chunks), bed.expected(chunks))


@pytest.mark.parametrize("pages", [[3, 4, 5, 6], [6, 5, 4, 3], [3, 4, 6, 7], [4, 5, 6, 3]])
def test_runs_of_pages_are_read_in_order(pages):
    """Consecutive pages are read without a copy; nothing else may be mistaken for them."""
    bed = Bed(page_size=4)
    bed.add("a", 16, pages=pages)
    for length in (1, 4, 5, 12, 13, 16):
        chunk = [Chunk("a", length - 1, length)]
        assert_close(bed.step(TorchDenseBackend(bed.storage), chunk), bed.expected(chunk))


@pytest.mark.parametrize("workspace", [1, 3000, 1 << 22])
@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 100])
def test_prefill_in_chunks(workspace, chunk):
    bed = bed_of(100)
    backend = TorchDenseBackend(bed.storage, workspace_bytes=workspace)
    for start in range(0, 100, chunk):
        chunks = [Chunk("r0", start, min(start + chunk, 100))]
        assert_close(bed.step(backend, chunks, 1), bed.expected(chunks))


@pytest.mark.parametrize("piece", [4, 8, 9])
def test_ragged_prefixes_around_a_piece(piece):
    """Prefixes 0, 1, piece, piece + 1 of keys together, in pieces of exactly that many keys."""
    bed = bed_of(20, 20, 20, 20)
    per_key = 8 * bed.heads * (8 + 4 + 6)
    backend = TorchDenseBackend(bed.storage, workspace_bytes=piece * per_key)
    prefixes = (0, 1, piece, piece + 1)
    chunks = [Chunk(f"r{i}", p, p + 5 + i) for i, p in enumerate(prefixes)]
    assert_close(bed.step(backend, chunks, 4), bed.expected(chunks))


@pytest.mark.parametrize("lengths", [(1, 7), (1, 1), (7, 7), (16, 17)])
@pytest.mark.parametrize("topk", [None, 16])
def test_num_15_two_requests_of_few_tokens(lengths, topk):
    bed = bed_of(*lengths)
    backend: AttentionBackend = TorchDenseBackend(bed.storage)
    if topk is not None:
        backend = DsaBackend(backend, bed.storage, topk)
    chunks = [Chunk(f"r{i}", 0, length) for i, length in enumerate(lengths)]
    together = bed.step(backend, chunks, 2)
    assert_close(together, bed.expected(chunks, topk))
    assert_close(together, torch.cat([bed.step(backend, [c], 1) for c in chunks]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rows(dtype):
    """Within the rounding of the format, from a cache of that format."""
    bed = Bed(dtype=dtype)
    for i in range(2):
        tokens = bed.add(f"r{i}", 40)
        for name in ("latent", "rope", "index_k", "q_nope", "q_rope", "index_q"):
            setattr(tokens, name, getattr(tokens, name).to(dtype).float())
    backend = TorchDenseBackend(bed.storage)
    chunks = [Chunk("r0", 10, 40), Chunk("r1", 39, 40)]
    out = bed.step(backend, chunks, 1)
    assert out.dtype == dtype
    expected = bed.expected(chunks)
    bound = 8 * torch.finfo(dtype).eps * expected.abs().max()
    assert (out.float() - expected).abs().max() < bound


@pytest.mark.parametrize("topk", [None, 16])
def test_decode_has_the_same_bits_whoever_else_is_in_the_batch(topk):
    """As many requests of other lengths: padding and tiles change, a request's bits do not."""
    own = (40, 17, 16, 3)
    bed = bed_of(*own, 64, 9, 300, 1, 200, 41, 15, 17, num_pages=400)
    backend: AttentionBackend = TorchDenseBackend(bed.storage)
    if topk is not None:
        backend = DsaBackend(backend, bed.storage, topk, mode="sparse")
    lengths = [len(tokens.latent[0]) for tokens in bed.sequences.values()]
    everyone = ends(*lengths)
    near = bed.step(backend, everyone[:4] + everyone[4:8])
    far = bed.step(backend, everyone[:4] + everyone[8:])
    assert torch.equal(near[:4], far[:4])
