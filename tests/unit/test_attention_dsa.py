"""The DSA backend against the definition: borders, modes, mixed steps, shared layers, debugging."""

import pytest
import torch

from attention_bed import TOPK, Bed, Chunk, assert_close
from minidsa.attention.base import Query
from minidsa.attention.dense.torch_ref import TorchDenseBackend
from minidsa.attention.sparse.dsa import DsaBackend
from minidsa.configs.sampling import AttentionRule


def dsa(bed: Bed, topk: int = TOPK, **kwargs) -> DsaBackend:
    dense = TorchDenseBackend(bed.storage)
    return DsaBackend(dense, bed.storage, topk, check_selections=True, **kwargs)


def bed_of(*lengths: int, **kwargs) -> Bed:
    bed = Bed(**kwargs)
    for i, length in enumerate(lengths):
        bed.add(f"r{i}", length)
    return bed


def ends(*lengths: int, width: int = 1) -> list[Chunk]:
    return [Chunk(f"r{i}", length - width, length) for i, length in enumerate(lengths)]


@pytest.mark.parametrize("mode", ["auto", "sparse"])
@pytest.mark.parametrize("length", [15, 16, 17, 64])
def test_num_03_around_the_border_of_sparsity(mode, length):
    bed = bed_of(length)
    chunk = [Chunk("r0", 0, length)]
    out = bed.step(dsa(bed, mode=mode), chunk, 1)
    assert_close(out, bed.expected(chunk, TOPK))
    assert_close(out[:TOPK], bed.expected(chunk)[:TOPK])
    if length > TOPK:
        assert not torch.allclose(out[TOPK:], bed.expected(chunk)[TOPK:], atol=1e-3)


@pytest.mark.parametrize("page_size", [4, 8, 16])
@pytest.mark.parametrize("border", ["page", "topk"])
def test_num_19_prompts_and_decodes_across_borders(page_size, border):
    """Prompt lengths around a page and around index_topk, then six tokens one at a time."""
    for length in range(-1, 2):
        length += page_size if border == "page" else TOPK
        bed = bed_of(length + 6, page_size=page_size)
        backend = dsa(bed)
        prompt = [Chunk("r0", 0, length)]
        assert_close(bed.step(backend, prompt, 1), bed.expected(prompt, TOPK))
        for i in range(length, length + 6):
            token = [Chunk("r0", i, i + 1)]
            out = bed.step(backend, token)
            assert_close(out, bed.expected(token, TOPK))
            if i < TOPK:
                assert_close(out, bed.expected(token))


@pytest.mark.parametrize("length", [1, 7, TOPK])
@pytest.mark.parametrize("extends", [0, 1])
def test_num_08_sparse_equals_dense_where_all_is_selected(length, extends):
    bed = bed_of(length)
    chunk = [Chunk("r0", 0 if extends else length - 1, length)]
    outs = [bed.step(dsa(bed, mode=mode), chunk, extends) for mode in ("auto", "sparse", "dense")]
    for out in outs:
        assert_close(out, bed.expected(chunk))


def test_num_08_planted_empty_row_raises_when_selections_are_checked():
    bed = bed_of(40)

    def plant(layer: int, positions: torch.Tensor, counts: torch.Tensor) -> None:
        positions[0] = -1

    with pytest.raises(RuntimeError, match="row 0 sees 40 keys and must select 16"):
        bed.step(dsa(bed, on_select=plant), ends(40))


@pytest.mark.parametrize("chunk", [1, 5, 16, 17, 50])
def test_chunks_of_any_size(chunk):
    bed = bed_of(90)
    backend = dsa(bed)
    for start in range(0, 90, chunk):
        chunks = [Chunk("r0", start, min(start + chunk, 90))]
        assert_close(bed.step(backend, chunks, 1), bed.expected(chunks, TOPK))


@pytest.mark.parametrize("width", range(1, 7))
@pytest.mark.parametrize("workspace", [1, 30_000, 1 << 22])
def test_verify_of_any_width(width, workspace):
    """Rows of one request may lie on both sides of index_topk."""
    lengths = (width, TOPK, TOPK + 1, TOPK + width, 90, 300)
    bed = bed_of(*(max(length, width) for length in lengths), num_pages=400)
    chunks = ends(*(max(length, width) for length in lengths), width=width)
    out = bed.step(dsa(bed, workspace_bytes=workspace), chunks)
    assert_close(out, bed.expected(chunks, TOPK))


def paged(bed: Bed, name: str, length: int, pages: list[int]) -> Chunk:
    bed.add(name, length, pages)
    return Chunk(name, length - 1, length)


# Pages of the first sequence: one run, runs with breaks, a break before a short end, all scattered.
RUNS = {
    "one run": [range(1, 101)],
    "two runs": [range(150, 200), range(1, 51)],
    "run, then single pages": [range(1, 81), range(150, 190, 2)],
    "single pages, then a run": [range(1, 41, 2), range(100, 180)],
    "run and one page": [range(1, 100), [150]],
    "one page and a run": [[150], range(1, 100)],
    "pages between runs": [range(1, 40), [150], range(50, 90), [160, 170], range(100, 118)],
    "descending": [range(100, 0, -1)],
    "scattered": [range(1, 200, 2)],
}


@pytest.mark.parametrize("pages", RUNS)
@pytest.mark.parametrize("mode", ["auto", "dense"])
@pytest.mark.parametrize("length", [300, 397, 400])
def test_pages_in_runs_and_between_them(pages, mode, length):
    """Runs are read in place and the rest is copied: the results are those of scattered pages."""
    laid_out = [page for run in RUNS[pages] for page in run]
    assert len(laid_out) == len(set(laid_out)) == 100
    bed = Bed(num_pages=500)
    chunks = [paged(bed, "a", length, laid_out), paged(bed, "b", 9, [201, 202, 203])]
    scattered = Bed(num_pages=500)
    others = [paged(scattered, "a", length, list(range(201, 401, 2)))]
    others.append(paged(scattered, "b", 9, [101, 102, 103]))
    backend = dsa(bed, mode=mode)
    out = bed.step(backend, chunks)
    assert_close(out, bed.expected(chunks, None if mode == "dense" else TOPK))
    if mode == "auto":
        assert torch.equal(out, scattered.step(dsa(scattered), others))
    prompt = [Chunk("a", length - 50, length)]
    assert_close(
        bed.step(backend, prompt, 1), bed.expected(prompt, None if mode == "dense" else TOPK)
    )


def test_many_decodes_of_very_different_lengths():
    """Tiles of every kind: copied together, alone, and read in place."""
    lengths = (300, 5, 17, 700, 16, 310, 40, 690, 330, 1)
    for runs in (False, True):
        bed = Bed(num_pages=900)
        page = 1
        for i, length in enumerate(lengths):
            count = -(-length // bed.page_size)
            bed.add(f"r{i}", length, list(range(page, page + count)) if runs else None)
            page += count
        out = bed.step(dsa(bed), ends(*lengths))
        assert_close(out, bed.expected(ends(*lengths), TOPK))


def test_num_16_a_marked_token_is_selected_wherever_it_stands():
    """Index keys that make one token score highest: 128 tokens are eight times index_topk."""
    for marker in (0, 64, 126):
        bed = Bed()
        tokens = bed.add("r0", 128)
        tokens.index_q[:] = 1.0
        tokens.index_w[:] = 1.0
        tokens.index_k[:] = tokens.index_k.abs() * 1e-3
        tokens.index_k[:, marker] = 1.0
        seen = []
        backend = dsa(bed, on_select=lambda layer, ids, counts, seen=seen: seen.append(ids.clone()))
        out = bed.step(backend, [Chunk("r0", 127, 128)])
        assert marker in seen[0][0].tolist()
        assert seen[0].shape == (1, TOPK)
        assert_close(out, bed.expected([Chunk("r0", 127, 128)], TOPK))


def test_num_07_equal_scores_select_the_first_positions():
    bed = Bed()
    bed.add("r0", 64).index_w[:] = 0.0
    seen = []
    backend = dsa(bed, on_select=lambda layer, ids, counts: seen.append(ids.clone()))
    for chunk, extends in ((Chunk("r0", 0, 64), 1), (Chunk("r0", 63, 64), 0)):
        for _ in range(3):
            bed.step(backend, [chunk], extends)
            assert seen.pop()[-1].tolist() == list(range(TOPK))


def test_recorder_sees_what_the_definition_selects():
    bed = bed_of(50, 40, 20)
    seen = {}

    def watch(layer: int, positions: torch.Tensor, counts: torch.Tensor) -> None:
        rows = zip(positions.tolist(), counts.tolist(), strict=True)
        seen.setdefault(layer, []).extend(row[:count] for row, count in rows)

    backend = dsa(bed, on_select=watch)
    chunks = [Chunk("r0", 5, 50), Chunk("r1", 39, 40), Chunk("r2", 19, 20)]
    plan = backend.plan(bed.batch(chunks, 1))
    for layer in range(2):
        bed.attend(backend, plan, chunks, layer)
        expected = [
            bed.selected(c.name, i, TOPK, layer) for c in chunks for i in range(c.start, c.stop)
        ]
        assert seen[layer] == expected


@pytest.mark.parametrize("extends", [0, 1])
def test_layers_without_index_keys_follow_the_layer_before(extends):
    bed = bed_of(60, 33, index_layers=(True, False, False, True, False))
    backend = dsa(bed)
    chunks = [Chunk("r0", 50, 60), Chunk("r1", 23, 33)]
    plan = backend.plan(bed.batch(chunks, 2 * extends))
    for layer in range(5):
        q = bed.query(chunks, layer)
        if not bed.index_layers[layer]:
            q = Query(q.nope_THN, q.rope_THR)
        attend = backend.prefill if extends else backend.decode
        assert_close(attend(bed.layers[layer], q, plan), bed.expected(chunks, TOPK, layer))


def test_layer_without_index_keys_needs_one_before_it():
    bed = bed_of(60, index_layers=(False, True))
    backend = dsa(bed)
    with pytest.raises(ValueError, match="layer 0 keeps no index keys and no layer before it"):
        bed.step(backend, ends(60))
    plan = backend.plan(bed.batch(ends(60), 0))
    bed.attend(backend, plan, ends(60), 1)
    plan = backend.plan(bed.batch(ends(60), 0), out=plan)
    with pytest.raises(ValueError, match="no layer before it"):
        bed.attend(backend, plan, ends(60), 0)


def test_query_without_an_index_part_is_refused():
    bed = bed_of(60)
    backend, q = dsa(bed), bed.query(ends(60), 0)
    plan = backend.plan(bed.batch(ends(60), 0))
    assert plan.selects
    with pytest.raises(ValueError, match="selects in layer 0, but the query has no index part"):
        backend.decode(bed.layers[0], Query(q.nope_THN, q.rope_THR), plan)


@pytest.mark.parametrize("score", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_no_numbers_choose_and_harm_nobody_else(score):
    """One request's index keys are broken: its mates keep their results, its own are finite."""
    bed = Bed()
    for i, length in enumerate((50, 60, 70)):
        bed.add(f"r{i}", length)
    bed.sequences["r1"].index_k[:, 3:40] = score
    out = bed.step(dsa(bed), ends(50, 60, 70))
    assert out.isfinite().all()
    assert_close(out[[0, 2]], bed.expected(ends(50, 60, 70), TOPK)[[0, 2]])


def test_row_has_the_same_bits_in_a_chunk_and_in_a_verify_step():
    """Always K places for a row: neither the chunk nor the context's padding moves a bit."""
    bed = bed_of(200, 90, num_pages=200)
    backend = dsa(bed, mode="sparse")
    verify = bed.step(backend, [Chunk("r0", 192, 200), Chunk("r1", 82, 90)])
    chunk = bed.step(backend, [Chunk("r0", 100, 200)], 1)
    late = bed.step(backend, [Chunk("r0", 190, 200)], 1)
    assert torch.equal(verify[:8], chunk[-8:])
    assert torch.equal(verify[:8], late[-8:])


def test_constructor_refuses():
    bed = bed_of(5)
    with pytest.raises(ValueError, match="index_topk must be at least 1, got 0"):
        dsa(bed, topk=0)
    with pytest.raises(ValueError, match="mode 'both' does not exist; there are: auto, sparse"):
        dsa(bed, mode="both")


def test_selections_are_timed_and_their_keys_counted():
    bed = bed_of(TOPK + 4, 3)
    backend = dsa(bed)
    counts = backend.clock.counts
    bed.step(backend, [Chunk("r0", 0, TOPK)], 1)
    assert counts.num_timed == 0  # every key was attended to: nothing to select
    bed.step(backend, [Chunk("r0", TOPK, TOPK + 4)], 1)
    assert counts.num_timed == 1 and counts.seconds > 0  # of the one layer
    for lengths in ((TOPK + 4, 3), (TOPK,)):
        backend.count(([], lengths))
    assert (counts.num_rows, counts.num_keys) == (2, TOPK + 3)
    other = backend.under(AttentionRule(index_topk=2))
    other.count(([5], []))
    assert (counts.num_rows, counts.num_keys) == (3, TOPK + 5)
