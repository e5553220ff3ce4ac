"""What the slice benchmark makes of a trace; nothing is timed here."""

from benchmarks.step_split import Kernel, part_of, split


def test_parts_gaps_and_launches_of_a_step():
    first = [Kernel("_linear", 0, 50), Kernel("_products", 70, 100), Kernel("copy", 90, 110)]
    second = [Kernel("_linear", 500, 560), Kernel("_products", 560, 590)]
    measured = split([first, second])
    assert measured.launches == 2.5
    # The last two of the first step overlap, so that 20 us of its 110 are a gap.
    assert measured.as_row() == {
        "launches": 2,
        "gpu_ms": 0.1,
        "gaps_ms": 0.01,
        "parts_ms": {"projections": 0.055, "experts": 0.03, "other": 0.01},
    }
    assert [name for name, _, _ in measured.kernels] == ["_linear", "_products", "copy"]
    assert "projections" in measured.table()


def test_the_kernels_of_a_step_have_parts():
    kernels = {
        "_logits": "indexer",
        "_logits_of_pages": "indexer",
        "_select": "top-k",
        "_attend_slots": "attention",
        "_join_parts": "attention",
        "_fp32_product": "experts",
        "_best_of_parts": "sampling",
        "_norm_rows": "norms, rope",
        "nvjet_sm90_tst_128x8_64x12_2x1_v_bz_TNT": "projections",
        "Memcpy HtoD (Pinned -> Device)": "other",
    }
    assert {name: part_of(name) for name in kernels} == kernels
