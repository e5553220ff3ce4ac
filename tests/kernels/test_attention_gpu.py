"""Latent attention on a GPU at the sizes that are served: far offsets, long requests, a real model.

pytest -m gpu tests/kernels
"""

from pathlib import Path

import pytest
import torch

from kernel_bed import assert_lse, assert_near, poisoned
from minidsa.attention.kernels.fp8_rows import new_fp8_latent_rows
from minidsa.attention.kernels.mla_decode import DecodeParts, decode_tiling, mla_decode
from minidsa.attention.kernels.mla_prefill import ExpandedKeys, mla_prefill, prefill_rounds
from minidsa.attention.kernels.reference import expanded_attention, sparse_attention
from minidsa.attention.kernels.sparse_mla import sparse_mla
from minidsa.attention.metadata import Part
from minidsa.attention.registry import choose
from minidsa.model.checkpoint import read_config
from minidsa.model.deepseek import DeepseekModel
from minidsa.model.loader import load_model
from stepper import Stepper, new_storage

pytestmark = pytest.mark.gpu

C, R, X, PAGE = 512, 64, 576, 64
CUDA = torch.device("cuda")
BF16 = torch.bfloat16
TINY_DSA = Path(__file__).parents[2] / "checkpoints" / "tiny-dsa"


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA, dtype=BF16) * scale


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("tokens", [1, 8, 140])
def test_sparse_attention_behind_2_to_31_elements(heads, is_fp8, tokens):
    """Four million rows; each query reads from both ends, with holes and a short list."""
    count = 4_000_000
    near = torch.randint(0, 1000, (tokens, 1024), device=CUDA)
    slots = torch.cat((near, count - 1 - near), dim=1).int()
    slots[:, 100:200] = -1
    counts = torch.full((tokens,), 2048, device=CUDA)
    counts[0] = 1111
    if is_fp8:
        fp8 = new_fp8_latent_rows(count, C, R, CUDA)
        fp8.rows_SX.fill_(0xFF)
        for first in (0, count - 1000):
            at = torch.arange(first, first + 1000, device=CUDA)
            fp8.write(at, normal(1000, C, scale=0.3), normal(1000, R, scale=0.3))
        rows = fp8.rows_SX
        plain = torch.cat(
            [fp8.read(torch.arange(i, i + 1000, device=CUDA)) for i in (0, count - 1000)]
        )
    else:
        rows = torch.full((count, X), torch.nan, device=CUDA, dtype=BF16)
        rows[:1000], rows[-1000:] = normal(1000, X, scale=0.3), normal(1000, X, scale=0.3)
        plain = torch.cat((rows[:1000], rows[-1000:]))
    q = normal(tokens, heads, X, scale=X**-0.5)
    moved = torch.where(slots >= count - 1000, slots - count + 2000, slots)
    expected, expected_lse = sparse_attention(q[:4], plain, moved[:4], counts[:4], C)
    for parts in (None, 1, 5):
        with poisoned():
            out, lse = sparse_mla(q, rows, slots, counts, C, num_parts=parts)
        assert out.isfinite().all()
        assert_near(out[:4], expected, BF16)
        assert_lse(lse[:4], expected_lse, BF16)


@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_decode_of_1_to_160k_tokens(heads, width):
    """On shuffled pages that lie behind 2^31 elements, with NaN between the requests."""
    lengths = [width, 63 + width, 64 + width, 4097, 160_000, 0]
    pages = [-(-length // PAGE) for length in lengths]
    total = 60_000
    rows = torch.full((total * PAGE, X), torch.nan, device=CUDA, dtype=BF16)
    order = (total - 1 - torch.randperm(sum(pages), device=CUDA)).int()
    table = torch.full((len(lengths), max(pages)), 2**31 - 1, dtype=torch.int32, device=CUDA)
    taken = 0
    for request, (length, needed) in enumerate(zip(lengths, pages, strict=True)):
        table[request, :needed] = order[taken : taken + needed]
        taken += needed
        rows[slots_of(table[request], length)] = normal(length, X, scale=0.3)
    q = normal(len(lengths) * width, heads, X, scale=X**-0.5)
    tiling = decode_tiling(width * heads, rows, C)
    parts = DecodeParts.of(lengths, width * heads, tiling, CUDA)
    with poisoned():
        out, lse = mla_decode(q, rows, table, PAGE, parts, C)
    assert not out[-width:].any() and out.isfinite().all()
    for request, length in enumerate(lengths[:-1]):
        slots = slots_of(table[request], length).expand(width, -1)
        counts = torch.arange(length - width + 1, length + 1, device=CUDA)
        own = slice(request * width, (request + 1) * width)
        for j in range(width):
            row = slice(own.start + j, own.start + j + 1)
            expected, expected_lse = sparse_attention(
                q[row], rows, slots[j : j + 1], counts[j : j + 1], C
            )
            assert_near(out[row], expected, BF16)
            assert_lse(lse[row], expected_lse, BF16)


@pytest.mark.parametrize("heads", [33, 65, 128])
@pytest.mark.parametrize("width", [1, 2])
def test_decode_of_fp8_pages(heads, width):
    """Foreign rows of a request's last page are NaN, and pages behind it do not exist."""
    lengths = [width, 0, 64 + width, 127, 3001]
    order = torch.randperm(60, device=CUDA).int().view(5, 12)
    table = torch.full((5, 60), 2**31 - 1, dtype=torch.int32, device=CUDA)
    table[:, :12] = order
    table[4, 12:47] = torch.arange(60, 95, device=CUDA)
    fp8 = new_fp8_latent_rows(95 * PAGE, C, R, CUDA)
    fp8.rows_SX.fill_(0xFF)
    for request, length in enumerate(lengths):
        at = slots_of(table[request], length)
        fp8.write(at, normal(length, C, scale=0.3), normal(length, R, scale=0.3))
    q = normal(5 * width, heads, X, scale=X**-0.5)
    tiling = decode_tiling(width * heads, fp8.rows_SX, C)
    for processors in (1, 132):
        parts = DecodeParts.of(lengths, width * heads, tiling, CUDA, processors)
        with poisoned():
            out, lse = mla_decode(q, fp8.rows_SX, table, PAGE, parts, C)
        for row in range(5 * width):
            length = lengths[row // width]
            plain = fp8.read(slots_of(table[row // width], length))
            slots = torch.arange(length, device=CUDA).unsqueeze(0)
            counts = torch.tensor([max(0, length - width + row % width + 1)], device=CUDA)
            inputs = (q[row : row + 1], plain, slots, counts, C)
            if not length:
                assert not out[row].any() and (lse[row] == -torch.inf).all()
                continue
            expected, expected_lse = sparse_attention(*inputs)
            assert_near(out[row], expected[0], BF16)
            assert_lse(lse[row], expected_lse[0], BF16)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.uint8])
@pytest.mark.parametrize("heads", [33, 65, 100])
def test_odd_heads_and_queries_that_see_nothing(heads, dtype):
    """Of five queries one has no slots and one only holes, and both are NaN themselves."""
    rows = plain = normal(500, X, scale=0.3)
    if dtype == torch.uint8:
        fp8, dtype = new_fp8_latent_rows(500, C, R, CUDA), BF16
        fp8.write(torch.arange(500, device=CUDA), rows[:, :C], rows[:, C:])
        rows, plain = fp8.rows_SX, fp8.read(torch.arange(500, device=CUDA))
    else:
        rows = plain = rows.to(dtype)
    q = normal(5, heads, X, scale=X**-0.5).to(dtype)
    q[1:3] = torch.nan
    slots = torch.randint(0, 500, (5, 300), device=CUDA).int()
    slots[2] = -1
    counts = torch.tensor([300, 0, 300, 1, 129], device=CUDA)
    expected, expected_lse = sparse_attention(q, plain, slots, counts, C)
    for parts in (1, 3):
        with poisoned():
            out, lse = sparse_mla(q, rows, slots, counts, C, num_parts=parts)
        assert not out[1:3].any() and (lse[1:3] == -torch.inf).all()
        seen = [0, 3, 4]
        assert_near(out[seen], expected[seen], dtype)
        assert_lse(lse[seen], expected_lse[seen], dtype)


def slots_of(pages: torch.Tensor, length: int) -> torch.Tensor:
    positions = torch.arange(length, device=CUDA)
    return pages[positions // PAGE].long() * PAGE + positions % PAGE


@pytest.mark.parametrize("keys_at_once", [1 << 20, 3000, 1000])
@pytest.mark.parametrize(("width", "v_width"), [(128, 128), (192, 256)])
def test_prefill_in_rounds(keys_at_once, width, v_width):
    lengths, queries, heads = (1, 2500, 129, 4000), (1, 2500, 1, 700), 4
    part = Part(
        queries,
        tuple(n - q for n, q in zip(lengths, queries, strict=True)),
        torch.zeros(4, 1, dtype=torch.int32, device=CUDA),
    )
    starts = torch.tensor([0, 1, 2501, 2630], device=CUDA)
    slots = starts[:, None] + torch.arange(max(lengths), device=CUDA)
    k, v = normal(heads, sum(lengths), width), normal(heads, sum(lengths), v_width)
    rows = normal(sum(lengths), X)
    q, q_rope = normal(sum(queries), heads, width), normal(sum(queries), heads, R)
    scale = (width + R) ** -0.5
    rounds = prefill_rounds(part, slots, keys_at_once)
    dtype = BF16 if len(rounds) == 1 else torch.float32
    with poisoned():
        out = torch.empty(sum(queries), heads, v_width, dtype=dtype, device=CUDA)
        lse = torch.empty(sum(queries), heads, device=CUDA)
        for work in rounds:
            at = work.slots_L
            keys = ExpandedKeys(k[:, at], rows[at, C:], v[:, at])
            mla_prefill(q, q_rope, keys, work.blocks_X6, scale, out, lse)
    for request, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        own = slice(part.starts[request], part.starts[request] + count)
        at = slots[request, :length]
        rope = rows[at, C:].expand(heads, -1, -1)
        expected, expected_lse = expanded_attention(
            (torch.cat((q[own], q_rope[own]), dim=-1) * scale).transpose(0, 1),
            torch.cat((k[:, at], rope), dim=-1),
            v[:, at],
            torch.arange(length - count + 1, length + 1, device=CUDA),
        )
        assert_near(out[own], expected.transpose(0, 1), BF16)
        assert_lse(lse[own], expected_lse.transpose(0, 1), BF16)


def stepper(model: DeepseekModel, name: str) -> Stepper:
    """A model over NaN-filled memory and the backend that the registry builds by this name."""
    storage = new_storage(model, 40, PAGE)
    has_indexer = model.config.indexer is not None
    choice = choose(
        name,
        device_type=model.device.type,
        dtype=model.dtype,
        page_size=PAGE,
        has_indexer=has_indexer,
    )
    topk = model.config.indexer.topk if model.config.indexer else None
    return Stepper(model, choice.build(storage, topk), storage)


def test_the_shipped_model_says_the_same_over_kernels():
    """Prompts past its selection: greedy tokens equal wherever bf16 can tell the best two apart.

    Torch in fp32 on the CPU leads; both backends are given its tokens, so one near tie does not
    decide about all that follow.
    """
    config = read_config(TINY_DSA)
    cpu = load_model(TINY_DSA, config, torch.float32, torch.device("cpu"))
    gpu = load_model(TINY_DSA, config, BF16, CUDA)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(10, config.vocab_size, (300,), generator=generator).tolist()
    leader = stepper(cpu, "torch")
    prompt_logits = leader.prefill("a", prompt, 100)
    first = int(prompt_logits[-1].argmax())
    tokens, logits = leader.greedy("a", first, 40)
    logits = torch.cat((prompt_logits, logits))
    best = logits.topk(2).values
    for name in ("torch", "triton"):
        follower = stepper(gpu, name)
        own = [follower.prefill("a", prompt, 100)]
        own += [follower.step([("a", [token])], 0) for token in (first, *tokens[:-1])]
        own = torch.cat(own).float().cpu()
        error = (own - logits).abs().amax(dim=1)
        clear = best[:, 0] - best[:, 1] > 2 * error.median() + 0.1
        assert own.isfinite().all() and clear.float().mean() > 0.3
        agree = own.argmax(1) == logits.argmax(1)
        assert agree[clear].float().mean() > 0.99, (name, int((~agree[clear]).sum()))
