"""Rows S1 to S43 of the seed behaviours: what the sparse backend owes, or its equivalent here.

The list of rows and the rules for equivalents are in docs/seed-behaviours.md.
"""

import dataclasses
import inspect

import pytest
import torch

from attention_bed import HEADS, LATENT, ROPE, TOPK, VALUE, Bed, Chunk, assert_close
from minidsa.attention.base import IndexQuery, MlaLayer, Query
from minidsa.attention.dense.torch_ref import TorchDenseBackend
from minidsa.attention.kernels.reference import (
    absorbed_query,
    slots_of_positions,
    sparse_attention,
    unabsorb,
)
from minidsa.attention.metadata import AttentionBatch
from minidsa.attention.registry import choose
from minidsa.attention.sparse.dsa import DsaBackend
from minidsa.attention.sparse.selection import Selection
from minidsa.kv_cache.layout import RowLayout
from minidsa.kv_cache.storage import CacheStorage


def dsa(bed: Bed, **kwargs) -> DsaBackend:
    return DsaBackend(TorchDenseBackend(bed.storage), bed.storage, TOPK, **kwargs)


def bed_of(*lengths: int, **kwargs) -> Bed:
    bed = Bed(**kwargs)
    for i, length in enumerate(lengths):
        bed.add(f"r{i}", length)
    return bed


def ends(*lengths: int, width: int = 1) -> list[Chunk]:
    return [Chunk(f"r{i}", length - width, length) for i, length in enumerate(lengths)]


def on_cpu(name: str, **kwargs):
    wish = {"device_type": "cpu", "dtype": torch.float32, "page_size": 4, "has_indexer": True}
    return choose(name, **(wish | kwargs))


def cache_bytes(bed: Bed) -> bytes:
    tensors = [bed.storage.latent_LSC, *(k for k in bed.storage.index_k if k is not None)]
    return b"".join(t.numpy().tobytes() for t in tensors)


# A. Construction and ownership


def test_s01_dense_side_is_picked_from_the_device_or_by_name():
    for choice in (on_cpu("auto"), on_cpu("torch")):
        backend = choice.build(bed_of(4).storage, TOPK)
        assert isinstance(backend, DsaBackend) and isinstance(backend.dense, TorchDenseBackend)
    with pytest.raises(
        ValueError, match=r"'rocm' does not exist; there are: auto, dsa, triton, torch"
    ):
        on_cpu("rocm")


def test_s02_sparse_is_for_models_with_an_indexer():
    with pytest.raises(ValueError, match=r"'dsa' needs a model with an indexer"):
        on_cpu("dsa", has_indexer=False)
    assert on_cpu("auto").sparse and not on_cpu("auto", has_indexer=False).sparse


def test_s03_scalars_of_a_layer_are_one_frozen_object():
    layer = bed_of(4).layers[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        layer.scale = 1.0  # pyright: ignore[reportAttributeAccessIssue]
    assert {f.name for f in dataclasses.fields(MlaLayer)} == {
        "index",
        "scale",
        "w_uk_HNC",
        "w_uv_HVC",
    }


def test_s04_one_batch_object_serves_both_paths():
    bed = bed_of(TOPK, 40)
    backend = dsa(bed)
    batch = bed.batch([Chunk("r0", 0, TOPK), Chunk("r1", 39, 40)], 1)
    plan = backend.plan(batch)
    assert plan.extends is None and plan.decodes is not None
    assert plan.batch is batch and plan.dense.batch is batch
    assert plan.decodes.part is batch.decodes


def test_s05_target_and_drafter_read_the_same_table():
    bed = bed_of(40)
    batch = bed.batch(ends(40), 0)
    target, drafter = dsa(bed).plan(batch), TorchDenseBackend(bed.storage).plan(batch)
    pointers = {p.batch.block_table_BP.data_ptr() for p in (target, target.dense, drafter)}
    assert pointers == {batch.block_table_BP.data_ptr()}


def test_s06_nobody_but_its_maker_writes_the_table():
    bed = bed_of(40, 12)
    chunks = [Chunk("r0", 20, 40), Chunk("r1", 11, 12)]
    batch = bed.batch(chunks, 1)
    writes = batch.block_table_BP._version
    backend = dsa(bed, mode="sparse")
    for _ in range(3):
        bed.attend(backend, backend.plan(batch), chunks)
    assert batch.block_table_BP._version == writes


def test_s07_there_is_no_step_counter_for_split_serving():
    bed = bed_of(4)
    for build in (
        lambda: dsa(bed, step_counter=object()),
        lambda: TorchDenseBackend(bed.storage, step_counter=object()),  # pyright: ignore
    ):
        with pytest.raises(TypeError, match="unexpected keyword argument 'step_counter'"):
            build()


def test_s08_parts_are_views_and_an_exception_leaves_the_batch_as_it_was():
    bed = bed_of(40, 30)
    batch = bed.batch([Chunk("r0", 30, 40), Chunk("r1", 29, 30)], 1)
    before = (batch.query_lens, batch.context_lens, batch.block_table_BP.clone())
    backend = dsa(bed)
    with pytest.raises(ValueError, match="tokens"):
        backend.decode(bed.layers[0], bed.query(ends(40, 30), 0), backend.plan(batch))
    assert batch.query_lens == before[0] and batch.context_lens == before[1]
    assert torch.equal(batch.block_table_BP, before[2])
    assert batch.extends.block_table_BP.data_ptr() == batch.block_table_BP.data_ptr()
    assert batch.decodes.query_lens == (1,) and batch.decodes.context_lens == (29,)


def test_s09_one_way_to_attend_and_no_unknown_mode():
    bed = bed_of(4)
    with pytest.raises(ValueError, match="mode 'chunked' does not exist; there are: auto, sparse"):
        dsa(bed, mode="chunked")
    public = {name for name, _ in inspect.getmembers(DsaBackend, inspect.isfunction)}
    # `selects` is a question about a length, asked before a plan is made; `under` gives another
    # backend, for a request that brings a rule of its own; `count` notes a step for the metrics.
    ways = {"plan", "selects", "prefill", "decode", "under", "count"}
    assert {name for name in public if not name.startswith("_")} == ways


# B. Metadata and plan


@pytest.mark.parametrize("width", range(1, 7))
def test_s10_visible_counts_equal_the_causal_mask(width):
    committed = (0, 5, 40)
    batch = bed_of(6, 11, 46).batch(
        [Chunk(f"r{i}", c, c + width) for i, c in enumerate(committed)], 0
    )
    longest = 40 + width
    for i, context in enumerate(committed):
        causal = torch.ones(longest, longest).tril()[context : context + width]
        counts = batch.decodes.visible()[i * width : (i + 1) * width]
        assert counts == causal.sum(dim=1).int().tolist()


def test_s11_s12_a_part_without_requests_has_no_plan():
    bed = bed_of(40, 40)
    backend = dsa(bed)
    prefills = backend.plan(bed.batch([Chunk("r0", 0, 40), Chunk("r1", 0, 40)], 2))
    assert prefills.extends is not None and prefills.decodes is None
    decodes = backend.plan(bed.batch(ends(40, 40), 0))
    assert decodes.extends is None and decodes.decodes is not None
    mixed = backend.plan(bed.batch([Chunk("r0", 0, 40), Chunk("r1", 39, 40)], 1))
    assert isinstance(mixed.decodes, Selection) and mixed.decodes.visible_T.tolist() == [40]


def test_s13_dense_plan_does_no_work_until_a_part_is_dense():
    bed = bed_of(40)
    backend = dsa(bed)
    plan = backend.plan(bed.batch(ends(40), 0))
    bed.attend(backend, plan, ends(40))
    dense = TorchDenseBackend(bed.storage).plan(plan.batch)
    assert dense.decodes.slots is None and plan.dense == dense


def test_s14_nothing_of_a_prefill_survives_into_the_next_step():
    bed = bed_of(40, 30)
    backend = dsa(bed)
    prefill = [Chunk("r0", 0, 39), Chunk("r1", 0, 29)]
    assert_close(bed.step(backend, prefill, 2), bed.expected(prefill, TOPK))
    assert_close(bed.step(backend, ends(40, 30)), bed.expected(ends(40, 30), TOPK))
    assert_close(bed.step(backend, ends(40)), bed.expected(ends(40), TOPK))


def buffers(plan) -> list[torch.Tensor]:
    """The device tensors of a sparse decode plan."""
    part = plan.decodes
    return [
        part.slots.table_BL,
        part.visible_T,
        part.hidden_TK,
        part.positions_TK,
        part.offsets_T1,
    ]


@pytest.mark.parametrize("width", [1, 3])
def test_s15_s16_s17_plan_refreshed_in_place(width):
    """Three replays with other lengths: no address moves, and each equals a fresh plan."""
    bed = bed_of(90, 80, 70, num_pages=100)
    backend = dsa(bed)
    lengths = [(30, 40, 50), (90, 17, 60), (width, 80, 16 + width), (50, 50, 50)]
    batches = [bed.batch(ends(*ls, width=width), 0, table_width=30) for ls in lengths]
    plan = backend.plan(batches[0])
    addresses = [t.data_ptr() for t in buffers(plan)]
    for ls, batch in list(zip(lengths, batches, strict=True))[1:]:
        assert backend.plan(batch, out=plan) is plan
        assert [t.data_ptr() for t in buffers(plan)] == addresses
        fresh = backend.plan(batch)
        chunks = ends(*ls, width=width)
        out = bed.attend(backend, plan, chunks)
        assert torch.equal(out, bed.attend(backend, fresh, chunks))
        assert_close(out, bed.expected(chunks, TOPK))
        for mine, new in zip(buffers(plan)[:2], buffers(fresh)[:2], strict=True):
            assert torch.equal(mine, new)
        assert torch.equal(buffers(plan)[3], buffers(fresh)[3])


def test_s17_plan_of_another_shape_is_refused():
    bed = bed_of(40, 50)
    backend = dsa(bed)
    plan = backend.plan(bed.batch(ends(40, 50), 0, table_width=13))
    others = {
        "make a new plan": [
            bed.batch(ends(40), 0, table_width=13),
            bed.batch(ends(40, 50, width=2), 0, table_width=13),
            bed.batch(ends(40, 50), 0, table_width=14),
            bed.batch(ends(9, 10), 0, table_width=13),
        ],
        "1 extends cannot be refreshed": [
            bed.batch([Chunk("r0", 39, 40), Chunk("r1", 49, 50)], 1, table_width=13)
        ],
    }
    for message, batches in others.items():
        for batch in batches:
            with pytest.raises(ValueError, match=message):
                backend.plan(batch, out=plan)
    dense = TorchDenseBackend(bed.storage)
    with pytest.raises(TypeError, match="a DsaPlan is expected, got TorchPlan"):
        backend.plan(plan.batch, out=dense.plan(plan.batch))


@pytest.mark.parametrize("mode", ["auto", "sparse", "dense"])
@pytest.mark.parametrize("width", range(1, 7))
def test_s18_s61_padding_requests_get_zeros(mode, width):
    """Context -w: no row of the padding sees a key. Its queries are NaN, page 0 too."""
    bed = bed_of(30, 20)
    real = bed.batch(ends(30, 20, width=width), 0)
    batch = dataclasses.replace(
        real,
        query_lens=(width,) * 4,
        context_lens=(*real.context_lens, -width, -width),
        positions_T=torch.cat((real.positions_T, torch.zeros(2 * width, dtype=torch.int64))),
        slots_T=torch.cat((real.slots_T, torch.zeros(2 * width, dtype=torch.int64))),
        block_table_BP=torch.nn.functional.pad(real.block_table_BP, (0, 0, 0, 2)),
    )
    q = bed.query(ends(30, 20, width=width), 0)
    index = q.index
    assert index is not None

    def padded(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((rows, torch.full_like(rows, torch.nan)))

    poisoned = Query(
        padded(q.nope_THN),
        padded(q.rope_THR),
        IndexQuery(padded(index.q_TnD), padded(index.weights_Tn)),
    )
    backend, before = dsa(bed, mode=mode), cache_bytes(bed)
    out = backend.decode(bed.layers[0], poisoned, backend.plan(batch))
    topk = None if mode == "dense" else TOPK
    assert_close(out[: 2 * width], bed.expected(ends(30, 20, width=width), topk))
    assert (out[2 * width :] == 0).all()
    assert cache_bytes(bed) == before


def test_s19_a_draft_advances_by_refreshing_its_plan():
    """Three advances of one token: the refreshed plan equals a fresh one each time."""
    bed = bed_of(60, 30)
    backend = dsa(bed)
    plan = backend.plan(bed.batch(ends(56, 26), 0, table_width=15))
    for step in range(1, 4):
        chunks = ends(56 + step, 26 + step)
        plan = backend.plan(bed.batch(chunks, 0, table_width=15), out=plan)
        assert isinstance(plan.decodes, Selection)
        assert plan.decodes.visible_T.tolist() == [56 + step, 26 + step]
        assert_close(bed.attend(backend, plan, chunks), bed.expected(chunks, TOPK))
    with pytest.raises(TypeError, match="a DsaPlan is expected, got NoneType"):
        backend.decode(bed.layers[0], bed.query(ends(60, 30), 0), None)  # pyright: ignore


# C. Validation and the dense path


def test_s20_no_layer_has_a_logit_cap():
    bed = bed_of(4)
    with pytest.raises(TypeError, match="logit_cap"):
        dataclasses.replace(bed.layers[0], logit_cap=30.0)  # pyright: ignore


@pytest.mark.parametrize("extends", [0, 1])
@pytest.mark.parametrize("length", [TOPK - 1, TOPK, TOPK + 1])
def test_s21_dense_up_to_topk_and_sparse_above(extends, length):
    bed = bed_of(length)
    chunk = [Chunk("r0", 0 if extends else length - 1, length)]
    backend = dsa(bed)
    plan = backend.plan(bed.batch(chunk, extends))
    assert plan.selects == (length > TOPK)
    last, dense = bed.attend(backend, plan, chunk)[-1], bed.expected(chunk)[-1]
    assert_close(last, bed.expected(chunk, TOPK)[-1])
    assert torch.allclose(last, dense, atol=1e-4) == (length <= TOPK)


def test_s22_each_part_decides_for_itself():
    bed = bed_of(50, TOPK, 9)
    chunks = [Chunk("r0", 0, 50), *ends(50, TOPK, 9)[1:]]
    backend = dsa(bed)
    plan = backend.plan(bed.batch(chunks, 1))
    assert plan.extends is not None and plan.decodes is None
    assert_close(bed.attend(backend, plan, chunks), bed.expected(chunks, TOPK))


def test_s23_forced_modes_agree_wherever_both_are_exact():
    bed = bed_of(40, 33, TOPK, 5)
    chunks = [Chunk("r0", 20, 40), *ends(40, 33, TOPK, 5)[1:]]
    auto, sparse = (bed.step(dsa(bed, mode=mode), chunks, 1) for mode in ("auto", "sparse"))
    assert_close(auto, sparse)
    short = ends(40, 33, TOPK, 5)[2:]
    outs = [bed.step(dsa(bed, mode=mode), short) for mode in ("auto", "sparse", "dense")]
    for out in outs:
        assert_close(out, bed.expected(short))


def test_s24_length_of_the_request_counts_not_of_the_chunk():
    bed = bed_of(60)
    backend = dsa(bed)
    for start in range(0, 60, 6):
        chunk = [Chunk("r0", start, start + 6)]
        plan = backend.plan(bed.batch(chunk, 1))
        assert plan.selects == (start + 6 > TOPK)
        assert_close(bed.attend(backend, plan, chunk), bed.expected(chunk, TOPK))


# D. Sparse prefill


def test_s25_selections_are_positions_packed_to_the_front():
    bed, seen = bed_of(30), []
    backend = dsa(bed, on_select=lambda layer, ids, counts: seen.append((ids.clone(), counts)))
    bed.step(backend, [Chunk("r0", 0, 30)], 1)
    (ids, counts) = seen[0]
    assert ids.shape == (30, TOPK) and counts.tolist() == [min(i + 1, TOPK) for i in range(30)]
    for i, (row, count) in enumerate(zip(ids.tolist(), counts.tolist(), strict=True)):
        assert row == bed.selected("r0", i) + [-1] * (TOPK - count)


@pytest.mark.parametrize("mode", ["auto", "sparse", "dense"])
def test_s26_attention_leaves_the_cache_as_it_is(mode):
    bed = bed_of(40, 30)
    chunks = [Chunk("r0", 10, 40), Chunk("r1", 29, 30)]
    batch, backend = bed.batch(chunks, 1), dsa(bed, mode=mode)
    before = cache_bytes(bed)
    bed.attend(backend, backend.plan(batch), chunks)
    assert cache_bytes(bed) == before


def wrong_queries(q: Query) -> list[tuple[type[Exception], str, Query]]:
    index = q.index
    assert index is not None
    short = IndexQuery(index.q_TnD[1:], index.weights_Tn)
    light = IndexQuery(index.q_TnD, index.weights_Tn[1:])
    return [
        (ValueError, r"has 2 tokens, the query's parts have \(1, 3\)", q.rows(0, 1)),
        (ValueError, r"\(2, 3\) and \(1, 3\)", Query(q.nope_THN, q.rope_THR[1:], index)),
        (ValueError, r"\(2, 3\) and \(2, 2\)", Query(q.nope_THN, q.rope_THR[:, 1:], index)),
        (ValueError, "has 1 and 2 rows and weights", Query(q.nope_THN, q.rope_THR, short)),
        (ValueError, "has 2 and 1 rows and weights", Query(q.nope_THN, q.rope_THR, light)),
        (
            TypeError,
            r"query is torch\.bfloat16, the cache holds torch\.float32",
            Query(q.nope_THN.bfloat16(), q.rope_THR.bfloat16(), index),
        ),
    ]


@pytest.mark.parametrize("part", ["prefill", "decode"])
@pytest.mark.parametrize("mode", ["sparse", "dense"])
def test_s27_s38_s40_queries_that_do_not_fit_the_plan_are_refused(part, mode):
    bed = bed_of(40, 30)
    chunks, backend = ends(40, 30), dsa(bed, mode=mode)
    plan = backend.plan(bed.batch(chunks, 2 if part == "prefill" else 0))
    for error, message, query in wrong_queries(bed.query(chunks, 0)):
        with pytest.raises(error, match=message):
            getattr(backend, part)(bed.layers[0], query, plan)


def test_s27_s38_s52_steps_whose_numbers_do_not_fit_are_refused():
    good = bed_of(40, 30).batch(ends(40, 30), 0)
    table = good.block_table_BP
    refusals = [
        (
            ValueError,
            "2 query lengths, 2 context lengths and 1 rows",
            {"block_table_BP": table[1:]},
        ),
        (ValueError, "2 query lengths, 1 context lengths", {"context_lens": (3,)}),
        (ValueError, "of 3 extends", {"num_extends": 3}),
        (ValueError, r"same number of tokens, got \(1, 2\)", {"query_lens": (1, 2)}),
        (ValueError, r"at least one token, got \(1, 0\)", {"query_lens": (1, 0)}),
        (ValueError, "2 tokens, 1 positions and 2 slots", {"positions_T": good.positions_T[1:]}),
        (ValueError, "2 tokens, 2 positions and 1 slots", {"slots_T": good.slots_T[1:]}),
        (TypeError, r"block table is int32, got torch\.int64", {"block_table_BP": table.long()}),
    ]
    for error, message, change in refusals:
        with pytest.raises(error, match=message):
            dataclasses.replace(good, **change)
    with pytest.raises(TypeError, match="context_lens"):
        AttentionBatch(num_extends=0, query_lens=(1,))  # pyright: ignore[reportCallIssue]


def test_s28_no_tokens_give_an_empty_result():
    bed = bed_of(40)
    nothing = bed.query([Chunk("r0", 0, 0)], 0)
    for mode in ("auto", "sparse", "dense"):
        backend = dsa(bed, mode=mode)
        decodes, prefills = bed.batch(ends(40), 0), bed.batch(ends(40), 1)
        outs = [
            backend.prefill(bed.layers[0], nothing, backend.plan(decodes)),
            backend.decode(bed.layers[0], nothing, backend.plan(prefills)),
        ]
        assert [tuple(out.shape) for out in outs] == [(0, HEADS, VALUE)] * 2


def test_s29_positions_become_slots():
    positions = torch.tensor([[0, 5, -1]], dtype=torch.int32)
    table = torch.tensor([[7, 3]], dtype=torch.int32)
    assert slots_of_positions(positions, table, 4).tolist() == [[28, 13, -1]]
    with pytest.raises(TypeError, match=r"int32 or int64, got torch\.float32"):
        slots_of_positions(positions.float(), table, 4)
    with pytest.raises(ValueError, match="2 dimensions, got 1"):
        slots_of_positions(positions, table[0], 4)


def test_s30_s33_s48_s66_other_cache_formats_are_refused():
    for dtype in (torch.float8_e4m3fn, torch.int8, torch.float64):
        with pytest.raises(ValueError, match=rf"torch\.float32.*not in {dtype}"):
            on_cpu("auto", dtype=dtype)


@pytest.mark.parametrize("length", [5, 40])
def test_s31_absorbed_equals_expanded(length):
    """The twin attends to latents; W_UV afterwards gives what expanded attention gives."""
    bed = bed_of(length)
    layer, q = bed.layers[0], bed.query(ends(length), 0)
    bed.write("r0", length)
    slots = torch.tensor([bed.slots("r0", 0, length)])
    q_THX = absorbed_query(q.nope_THN, q.rope_THR, layer.w_uk_HNC, layer.scale)
    latent, _ = sparse_attention(
        q_THX, bed.storage.latent_LSC[0], slots, torch.tensor([length]), LATENT
    )
    assert latent.shape == (1, HEADS, LATENT)
    assert_close(unabsorb(latent, layer.w_uv_HVC), bed.expected(ends(length)))


# E. Sparse decode and verify


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_s32_reference_takes_any_page_size(page_size):
    bed = bed_of(70, 20, page_size=page_size)
    chunks = [Chunk("r0", 30, 70), Chunk("r1", 19, 20)]
    assert_close(bed.step(dsa(bed), chunks, 1), bed.expected(chunks, TOPK))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_s34_query_and_cache_have_one_dtype_and_it_comes_back(dtype):
    bed = bed_of(40, dtype=dtype)
    out = bed.step(dsa(bed), ends(40))
    assert out.dtype == dtype and out.isfinite().all()


def test_s35_writing_is_a_step_of_its_own():
    layout = RowLayout(LATENT + ROPE, 8, (True,))
    storage = CacheStorage(layout, 4, 4, torch.float32, torch.device("cpu"))
    slots, rows, keys = torch.tensor([6, 9]), torch.randn(2, LATENT + ROPE), torch.randn(2, 8)
    storage.write_latent(0, slots, rows)
    storage.write_index(0, slots, keys)
    others = [s for s in range(16) if s not in (6, 9)]
    for written, values in ((storage.latent_LSC[0], rows), (storage.index_k[0], keys)):
        assert written is not None
        assert torch.equal(written[slots], values) and (written[others] == 0).all()


def test_s36_selection_buffer_has_one_type_and_width():
    bed = bed_of(40, 30)
    plan = dsa(bed).plan(bed.batch(ends(40, 30, width=2), 0))
    assert isinstance(plan.decodes, Selection)
    ids = plan.decodes.positions_TK
    assert ids.dtype == torch.int64 and ids.shape == (4, TOPK) and ids.is_contiguous()


def test_s37_rows_per_request_come_from_the_batch():
    """A verify step of four and draft steps of one through the same backend, in turn."""
    bed = bed_of(44, 34)
    backend = dsa(bed)
    for width in (4, 1, 4, 1):
        chunks = ends(44, 34, width=width)
        assert bed.batch(chunks, 0).decode_width == width
        assert_close(bed.step(backend, chunks), bed.expected(chunks, TOPK))


@pytest.mark.parametrize("extends", [1, 2])
def test_s39_decodes_of_a_mixed_step_use_their_own_lengths(extends):
    bed = bed_of(50, 45, 40, 30)
    chunks = [Chunk("r0", 0, 50), Chunk("r1", 44, 45), *ends(50, 45, 40, 30)[2:]]
    batch = bed.batch(chunks, extends)
    assert batch.decodes.kv_lens == (50, 45, 40, 30)[extends:]
    out = bed.step(dsa(bed), chunks, extends)
    assert_close(out, bed.expected(chunks, TOPK))


def test_s41_only_slots_and_counts_decide_what_a_row_sees():
    """A wider table, other pages behind the request and other mates change nothing."""
    bed = bed_of(40, 80)
    backend = dsa(bed)
    expected = bed.step(backend, ends(40))
    batch = bed.batch(ends(40), 0, table_width=20)
    batch.block_table_BP[0, 10:] = 200
    assert torch.equal(bed.attend(backend, backend.plan(batch), ends(40)), expected)
    assert_close(bed.step(backend, ends(40, 80))[:1], expected)


def test_s42_planning_reads_nothing_from_the_device():
    """A plan can be made where tensors have no values at all."""
    meta = torch.device("meta")
    storage = CacheStorage(RowLayout(LATENT + ROPE, 8, (True,)), 64, 4, torch.float32, meta)
    batch = AttentionBatch(
        num_extends=1,
        query_lens=(30, 2, 2),
        context_lens=(10, 38, 20),
        positions_T=torch.empty(34, dtype=torch.int64, device=meta),
        slots_T=torch.empty(34, dtype=torch.int64, device=meta),
        block_table_BP=torch.empty(3, 10, dtype=torch.int32, device=meta),
    )
    plan = DsaBackend(TorchDenseBackend(storage), storage, TOPK).plan(batch)
    assert plan.extends is not None and plan.decodes is not None
    assert plan.decodes.part.longest == 40


@pytest.mark.parametrize("width", range(1, 7))
def test_s43_verify_is_a_decode_of_more_tokens(width):
    """Of every width; the reference has no limit."""
    bed = bed_of(60, 20)
    chunks, backend = ends(60, 20, width=width), dsa(bed)
    out = bed.step(backend, chunks)
    assert_close(out, bed.expected(chunks, TOPK))
    for j in range(width):
        one = [Chunk(c.name, c.start + j, c.start + j + 1) for c in chunks]
        assert_close(bed.step(backend, one), out.view(2, width, HEADS, VALUE)[:, j])
