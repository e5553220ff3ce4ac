"""Where seed behaviours meet, and that every row of the list S1 to S71 has a test by its name.

The rows are in docs/seed-behaviours.md. What needs a device or a drafter to show (captured graphs,
shared buffers of target and drafter, compiled kernels) is shown here by the plans that a graph
would capture; the graph runner and the kernels test the rest under the same numbers.
"""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from attention_bed import TOPK, Bed, Chunk, assert_close
from minidsa.attention.base import IndexQuery, Query
from minidsa.attention.dense.torch_ref import TorchDenseBackend
from minidsa.attention.sparse.dsa import DsaBackend
from minidsa.attention.sparse.selection import Selection

TESTS = Path(__file__).parents[1]


def bed_of(*lengths: int, **kwargs) -> Bed:
    bed = Bed(**kwargs)
    for i, length in enumerate(lengths):
        bed.add(f"r{i}", length)
    return bed


def dsa(bed: Bed) -> DsaBackend:
    return DsaBackend(TorchDenseBackend(bed.storage), bed.storage, TOPK)


def ends(*lengths: int, width: int = 1) -> list[Chunk]:
    return [Chunk(f"r{i}", length - width, length) for i, length in enumerate(lengths)]


def test_every_row_has_a_test():
    names = [
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"def test_((?:s\d\d_)+)", path.read_text())
    ]
    covered = {int(row) for name in names for row in re.findall(r"s(\d\d)_", name)}
    assert covered == set(range(1, 72))


def test_s21_s22_s24_long_prefix_in_short_chunks_beside_decodes_at_the_border():
    bed = bed_of(60, TOPK, TOPK + 1)
    backend = dsa(bed)
    for start in range(24, 60, 6):
        chunks = [Chunk("r0", start, start + 6), *ends(60, TOPK, TOPK + 1)[1:]]
        out = bed.step(backend, chunks, 1)
        assert_close(out, bed.expected(chunks, TOPK))
        alone = [bed.step(backend, [chunk], int(chunk.name == "r0")) for chunk in chunks]
        assert_close(out, torch.cat(alone))


def test_s17_s45_s60_replay_after_a_larger_step_in_between():
    """Plan for 4, run 16 with a plan of their own, replay 4 on other pages and lengths."""
    bed = bed_of(*[20 + 3 * i for i in range(16)], num_pages=400)
    backend = dsa(bed)
    four, sixteen = ends(*[20 + 3 * i for i in range(4)]), ends(*[20 + 3 * i for i in range(16)])
    plan = backend.plan(bed.batch(four, 0, table_width=20))
    assert isinstance(plan.decodes, Selection)
    addresses = [plan.decodes.positions_TK.data_ptr(), plan.decodes.slots.table_BL.data_ptr()]
    assert_close(bed.attend(backend, plan, four), bed.expected(four, TOPK))
    assert_close(bed.step(backend, sixteen), bed.expected(sixteen, TOPK))
    others = [dataclasses.replace(chunk) for chunk in sixteen[8:12]]
    plan = backend.plan(bed.batch(others, 0, table_width=20), out=plan)
    assert isinstance(plan.decodes, Selection)
    out = bed.attend(backend, plan, others)
    assert torch.equal(out, bed.step(backend, others))
    assert_close(out, bed.expected(others, TOPK))
    assert addresses == [
        plan.decodes.positions_TK.data_ptr(),
        plan.decodes.slots.table_BL.data_ptr(),
    ]


def test_s18_s61_five_requests_in_a_plan_for_eight():
    """Width 4; the three others are padding with NaN queries, over a page 0 of NaN."""
    width, size = 4, 8
    bed = bed_of(30, 8, 20, 50, TOPK)
    chunks = ends(30, 8, 20, 50, TOPK, width=width)
    real = bed.batch(chunks, 0, table_width=13)
    pad = size - len(chunks)
    batch = dataclasses.replace(
        real,
        query_lens=(width,) * size,
        context_lens=(*real.context_lens, *[-width] * pad),
        positions_T=torch.nn.functional.pad(real.positions_T, (0, pad * width)),
        slots_T=torch.nn.functional.pad(real.slots_T, (0, pad * width)),
        block_table_BP=torch.nn.functional.pad(real.block_table_BP, (0, 0, 0, pad)),
    )
    q = bed.query(chunks, 0)
    assert q.index is not None
    rows = [q.nope_THN, q.rope_THR, q.index.q_TnD, q.index.weights_Tn]
    nope, rope, index_q, index_w = (
        torch.cat((r, r.new_full((pad * width, *r.shape[1:]), torch.nan))) for r in rows
    )
    backend = dsa(bed)
    full = bed.batch(ends(30, 8, 20, 50, TOPK, width=width), 0, table_width=13)
    filled = dataclasses.replace(
        batch,
        context_lens=(*real.context_lens, *real.context_lens[:pad]),
        block_table_BP=torch.cat((full.block_table_BP, full.block_table_BP[:pad])),
    )
    plan = backend.plan(batch, out=backend.plan(filled))
    out = backend.decode(bed.layers[0], Query(nope, rope, IndexQuery(index_q, index_w)), plan)
    assert_close(out[: len(chunks) * width], bed.expected(chunks, TOPK))
    assert (out[len(chunks) * width :] == 0).all()


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_s37_s71_rejected_rows_are_overwritten(accepted):
    """Three drafts, some accepted: afterwards the cache holds the bytes of a fresh prefill."""
    bed, fresh = bed_of(44), bed_of(44)
    drafts, length = bed.sequences["r0"], 40
    truth = {name: getattr(drafts, name).clone() for name in ("latent", "rope", "index_k")}
    wrong = slice(length + accepted, length + 3)
    for name in truth:
        getattr(drafts, name)[:, wrong] += 100.0
    backend = dsa(bed)
    bed.step(backend, [Chunk("r0", length - 1, length + 3)])
    for name, rows in truth.items():
        getattr(drafts, name).copy_(rows)
    drafts.written = length + accepted
    for i in range(length + accepted, 44):
        token = [Chunk("r0", i, i + 1)]
        assert_close(bed.step(backend, token), bed.expected(token, TOPK))
    fresh.write("r0", 44)
    slots = torch.tensor(bed.slots("r0", 0, 44))
    for layer in range(2):
        for rows in ("latent_rows", "index_rows"):
            mine, theirs = (getattr(b.storage, rows)(layer, slots) for b in (bed, fresh))
            assert torch.equal(mine, theirs)
