"""Rows S44 to S71 of the seed behaviours: what the dense backend owes, or its equivalent here.

The list of rows and the rules for equivalents are in docs/seed-behaviours.md.
"""

import dataclasses

import pytest
import torch

from attention_bed import HEADS, TOPK, VALUE, Bed, Chunk, assert_close
from minidsa.attention import registry
from minidsa.attention.base import AttentionBackend
from minidsa.attention.dense.torch_ref import TorchDenseBackend
from minidsa.attention.kernels.reference import expanded_attention, merge
from minidsa.attention.registry import Support, choose
from minidsa.attention.sparse.dsa import DsaBackend
from minidsa.attention.tiles import Workspace
from minidsa.kv_cache.pool import PagePool

INF = float("inf")


def bed_of(*lengths: int, **kwargs) -> Bed:
    bed = Bed(**kwargs)
    for i, length in enumerate(lengths):
        bed.add(f"r{i}", length)
    return bed


def dense(bed: Bed, **kwargs) -> TorchDenseBackend:
    return TorchDenseBackend(bed.storage, **kwargs)


def dsa(bed: Bed) -> DsaBackend:
    return DsaBackend(dense(bed), bed.storage, TOPK)


def ends(*lengths: int, width: int = 1) -> list[Chunk]:
    return [Chunk(f"r{i}", length - width, length) for i, length in enumerate(lengths)]


# F. Construction


def test_s44_model_without_an_indexer_gets_the_dense_backend():
    choice = choose("auto", device_type="cpu", dtype=torch.float32, page_size=4, has_indexer=False)
    assert isinstance(choice.build(bed_of(4).storage, None), TorchDenseBackend)
    with pytest.raises(ValueError, match="index_topk is 16, but the backend was chosen"):
        choice.build(bed_of(4).storage, TOPK)


@pytest.mark.parametrize("workspace", [1, 5_000, 1 << 22])
def test_s45_workspace_is_bounded_and_its_garbage_reaches_no_result(workspace, monkeypatch):
    """Memory that is handed out anew comes filled with NaN."""
    bed = bed_of(300, 20, 280, num_pages=400)
    chunks = [Chunk("r0", 100, 300), *ends(300, 20, 280)[1:]]
    batch = bed.batch(chunks, 1)
    backend = DsaBackend(
        dense(bed, workspace_bytes=workspace), bed.storage, TOPK, workspace_bytes=workspace
    )
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        out = bed.attend(backend, backend.plan(batch), chunks)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_close(out, bed.expected(chunks, TOPK))
    assert Workspace(0, 4, 4).queries(100) == Workspace(0, 4, 4).requests(100, 1) == 1
    assert Workspace(8_000, 4, 4).requests(100, 2) == 6
    assert Workspace(8_000, 4, 4).queries(100) == 19


def never(storage) -> AttentionBackend:
    raise AssertionError("built although refused")


KERNELS = Support(never, ("cuda",), (torch.bfloat16,), (32, 64))


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"device_type": "cpu"}, "runs on cuda, not on cpu"),
        ({"page_size": 16}, "takes pages of 32, 64 tokens, not of 16"),
        ({"dtype": torch.float16}, r"computes in torch\.bfloat16, not in torch\.float16"),
    ],
)
def test_s46_s47_s48_s49_refused_before_anything_is_built(monkeypatch, wish, message):
    """`choose` has no storage in its hands: a refusal allocates and compiles nothing."""
    monkeypatch.setattr(registry, "BACKENDS", {"kernels": KERNELS, **registry.BACKENDS})
    good = {"device_type": "cuda", "dtype": torch.bfloat16, "page_size": 64, "has_indexer": True}
    assert choose("kernels", **good).name == "kernels"
    with pytest.raises(ValueError, match=message):
        choose("kernels", **(good | wish))


def test_s49_one_line_names_the_choice():
    wish = {"device_type": "cpu", "dtype": torch.float32, "page_size": 4, "has_indexer": True}
    reason = choose("auto", **wish).reason
    assert reason.startswith("attention_backend torch: ") and "\n" not in reason


# G. Page tables and metadata


@pytest.mark.parametrize("table_width", [10, 11, 13, 30])
def test_s50_any_table_width_that_reaches(table_width):
    bed = bed_of(40, 20)
    for backend, topk in ((dense(bed), None), (dsa(bed), TOPK)):
        batch = bed.batch(ends(40, 20), 0, table_width=table_width)
        out = bed.attend(backend, backend.plan(batch), ends(40, 20))
        assert_close(out, bed.expected(ends(40, 20), topk))


def test_s50_table_that_does_not_reach_is_refused():
    bed = bed_of(40)
    batch = bed.batch(ends(40), 0, table_width=9)
    for backend in (dense(bed), dsa(bed)):
        with pytest.raises(ValueError, match="40 tokens has a block table that reaches to 36"):
            bed.attend(backend, backend.plan(batch), ends(40))


def test_s51_padding_of_the_table_is_page_0_which_nobody_gets():
    bed = bed_of(40, 5)
    batch = bed.batch(ends(40, 5), 0)
    assert batch.block_table_BP[1, 2:].tolist() == [0] * 8
    assert bed.storage.latent_LSC[:, :4].isnan().all()
    assert_close(bed.step(dense(bed), ends(40, 5)), bed.expected(ends(40, 5)))
    assert 0 not in PagePool(20).take(20)


def test_s52_s53_fields_of_a_batch_are_required_and_fixed():
    batch = bed_of(40).batch(ends(40), 0)
    for name in (field.name for field in dataclasses.fields(batch)):
        rest = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
        del rest[name]
        with pytest.raises(TypeError, match=name):
            type(batch)(**rest)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(batch, name, getattr(batch, name))


def test_s54_lengths_are_exact_host_numbers():
    batch = bed_of(40, 30, 20).batch(
        [Chunk("r0", 7, 40), Chunk("r1", 0, 30), *ends(40, 30, 20)[2:]], 2
    )
    assert batch.extends.starts == (0, 33) and batch.extends.longest == 40
    assert batch.extends.kv_lens == (40, 30) and batch.extends.num_tokens == 63
    assert batch.kv_lens == (40, 30, 20) and batch.decodes.starts == (0,)


@pytest.mark.parametrize("piece", [4, 8, 9])
def test_s55_s56_prefixes_around_the_piece_together(piece):
    """Prefixes of 0, 1, piece and piece + 1 tokens; the workspace holds `piece` expanded keys."""
    bed = bed_of(30, 30, 30, 30)
    row = HEADS * (8 + 4 + VALUE) * 8
    backend = dense(bed, workspace_bytes=piece * row)
    chunks = [Chunk(f"r{i}", p, p + 4 + i) for i, p in enumerate((0, 1, piece, piece + 1))]
    assert_close(bed.step(backend, chunks, 4), bed.expected(chunks))


def test_s57_nothing_to_restore_after_an_exception():
    bed = bed_of(40)
    backend = dense(bed)
    plan = backend.plan(bed.batch(ends(40), 0))
    with pytest.raises(ValueError, match="has 1 tokens"):
        backend.decode(bed.layers[0], bed.query(ends(40, width=2), 0), plan)
    assert plan.batch.num_extends == 0
    assert_close(bed.attend(backend, plan, ends(40)), bed.expected(ends(40)))


# H. CUDA graphs: here, plans refreshed in place


def test_s58_refreshed_plan_keeps_its_table_and_checks_shapes():
    bed = bed_of(40, 30)
    backend = dense(bed)
    plan = backend.plan(bed.batch(ends(40, 30), 0, table_width=12))
    bed.attend(backend, plan, ends(40, 30))
    assert plan.decodes.slots is not None
    address = plan.decodes.slots.table_BL.data_ptr()
    for lengths in ((39, 12), (3, 30), (40, 30)):
        batch = bed.batch(ends(*lengths), 0, table_width=12)
        assert backend.plan(batch, out=plan) is plan
        assert_close(bed.attend(backend, plan, ends(*lengths)), bed.expected(ends(*lengths)))
        assert plan.decodes.slots.table_BL.data_ptr() == address
    with pytest.raises(ValueError, match="make a new plan"):
        backend.plan(bed.batch(ends(40), 0, table_width=12), out=plan)
    with pytest.raises(TypeError, match="a TorchPlan is expected, got DsaPlan"):
        backend.plan(plan.batch, out=dsa(bed).plan(plan.batch))


@pytest.mark.parametrize("extends", [1, 2])
def test_s59_s60_a_prefill_never_enters_a_decode_plan(extends):
    bed = bed_of(40, 30)
    chunks = [Chunk("r0", 39, 40), Chunk("r1", 29, 30)]
    for backend in (dense(bed), dsa(bed)):
        decodes = backend.plan(bed.batch(chunks, 0))
        with pytest.raises(ValueError, match=f"a plan with {extends} extends cannot be refreshed"):
            backend.plan(bed.batch(chunks, extends), out=decodes)
        with pytest.raises(ValueError, match="cannot be refreshed"):
            backend.plan(bed.batch(chunks, 0), out=backend.plan(bed.batch(chunks, extends)))


def test_s60_replay_after_pages_went_to_another_request():
    bed = bed_of(40)
    first = bed.sequences["r0"]
    bed.write("r0", 40)
    backends = [(dense(bed), None), (dsa(bed), TOPK)]
    plans = [backend.plan(bed.batch(ends(40), 0)) for backend, _ in backends]
    for (backend, topk), plan in zip(backends, plans, strict=True):
        assert_close(bed.attend(backend, plan, ends(40)), bed.expected(ends(40), topk))
    bed.add("r1", 40, pages=first.pages[::-1])
    chunk = [Chunk("r1", 38, 39)]
    for (backend, topk), plan in zip(backends, plans, strict=True):
        backend.plan(bed.batch(chunk, 0, table_width=10), out=plan)
        assert_close(bed.attend(backend, plan, chunk), bed.expected(chunk, topk))


def test_s61_a_whole_batch_of_padding_gives_zeros():
    """The other pad rows are in test_s18_s61: every width, every mode."""
    bed = bed_of(40)
    real = bed.batch(ends(40), 0)
    batch = dataclasses.replace(
        real, context_lens=(-1,), block_table_BP=torch.zeros_like(real.block_table_BP)
    )
    for backend in (dense(bed), dsa(bed), DsaBackend(dense(bed), bed.storage, TOPK, mode="sparse")):
        assert (bed.attend(backend, backend.plan(batch), ends(40)) == 0).all()


# I. Forward


@pytest.mark.parametrize("width", range(1, 7))
def test_s62_verify_rows_equal_one_token_steps(width):
    bed = bed_of(50, 9, 20)
    chunks, backend = ends(50, 9, 20, width=width), dense(bed)
    out = bed.step(backend, chunks).view(3, width, HEADS, VALUE)
    for j in range(width):
        one = [Chunk(c.name, c.start + j, c.start + j + 1) for c in chunks]
        assert_close(out[:, j], bed.step(backend, one))
        assert_close(out[:, j], bed.expected(one))


def test_s63_query_of_another_dtype_than_the_cache_is_an_error():
    bed = bed_of(40)
    backend, half = dense(bed), bed_of(40, dtype=torch.bfloat16)
    plan = backend.plan(bed.batch(ends(40), 0))
    with pytest.raises(TypeError, match=r"torch\.bfloat16, the cache holds torch\.float32"):
        backend.decode(bed.layers[0], half.query(ends(40), 0), plan)


@pytest.mark.parametrize("extends", [0, 2])
def test_s64_results_are_values_per_head(extends):
    bed = bed_of(40, 30)
    for backend in (dense(bed), dsa(bed)):
        assert bed.step(backend, ends(40, 30), extends).shape == (2, HEADS, VALUE)


def test_s65_expanded_attention_returns_a_natural_log_sum_exp_in_fp32():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 4, generator=generator).bfloat16() for n in (3, 7, 7))
    out, lse = expanded_attention(q, k, v, torch.tensor([5, 6, 7]))
    assert lse.dtype == torch.float32 and out.shape == (2, 3, 4)
    logits = q[:, 1].float() @ k[:, :6].float().transpose(1, 2)
    assert_close(lse[:, 1], logits.diagonal().T.exp().sum(-1).log())


def test_s66_s67_no_fp8_prefill_and_no_hook_for_split_serving():
    with pytest.raises(ValueError, match=r"not in torch\.float8_e4m3fn"):
        choose(
            "torch",
            device_type="cuda",
            dtype=torch.float8_e4m3fn,
            page_size=64,
            has_indexer=False,
        )
    with pytest.raises(TypeError, match="on_causal_pass"):
        dense(bed_of(4), on_causal_pass=print)  # pyright: ignore[reportCallIssue]


def test_s68_merge_by_log_sum_exp():
    generator = torch.Generator().manual_seed(1)
    out = torch.randn(2, 3, 4, generator=generator)
    lse = torch.randn(2, 3, generator=generator)
    nothing = torch.zeros(2, 3, 4), torch.full((2, 3), -INF)
    merged = merge(out, lse, *nothing)
    assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    merged = merge(*nothing, *nothing)
    assert (merged[0] == 0).all() and (merged[1] == -INF).all()
    both, lse_both = merge(out, lse, out, lse)
    assert_close(both, out)
    assert_close(lse_both, lse + torch.log(torch.tensor(2.0)))


def test_s69_values_may_be_a_slice():
    """W_UK and W_UV of every test bed are slices of one tensor, and so may V be."""
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, n, 4, generator=generator) for n in (3, 7))
    wide = torch.randn(2, 7, 9, generator=generator)
    sliced = expanded_attention(q, k, wide[..., 2:6], None)[0]
    assert torch.equal(sliced, expanded_attention(q, k, wide[..., 2:6].contiguous(), None)[0])
    assert not bed_of(4).layers[0].w_uv_HVC.is_contiguous()


def test_s70_no_requests_at_all():
    bed = bed_of(40)
    batch = dataclasses.replace(
        bed.batch(ends(40), 0),
        query_lens=(),
        context_lens=(),
        positions_T=torch.empty(0, dtype=torch.int64),
        slots_T=torch.empty(0, dtype=torch.int64),
        block_table_BP=torch.empty(0, 10, dtype=torch.int32),
    )
    nothing = bed.query([Chunk("r0", 0, 0)], 0)
    for backend in (dense(bed), dsa(bed), DsaBackend(dense(bed), bed.storage, TOPK, mode="sparse")):
        for attend in (backend.decode, backend.prefill):
            out = attend(bed.layers[0], nothing, backend.plan(batch))
            assert out.shape == (0, HEADS, VALUE)


@pytest.mark.parametrize("width", [2, 4, 6])
def test_s71_catch_up_is_a_verify_with_bounds_per_row(width):
    """The first pass of a drafter over accepted tokens equals one token at a time."""
    bed = bed_of(60, 18)
    for backend, topk in ((dense(bed), None), (dsa(bed), TOPK)):
        batch = bed.batch(ends(60, 18, width=width), 0)
        assert batch.decodes.visible()[-width:] == list(range(18 - width + 1, 19))
        out = bed.attend(backend, backend.plan(batch), ends(60, 18, width=width))
        assert_close(out, bed.expected(ends(60, 18, width=width), topk))
