"""What the kernels' benchmark makes of its measurements; nothing is timed here."""

from argparse import Namespace

import pytest

from benchmarks import kernels
from benchmarks.kernel_cases import Case, Entry, closeness, floor_us, worst
from benchmarks.peers import Peers


def entry(name: str, cold: list[float], check: str = "ok") -> Entry:
    return Entry(name, lambda: None, lambda: check, cold, [t / 2 for t in cold])


class Measured:
    """A clock for entries that were measured before."""

    def measure(self, case: Case, rounds: int, repeats: int) -> None:
        assert all(e.cold_us for e in case.entries)


def rows_of(monkeypatch: pytest.MonkeyPatch, *entries: Entry) -> list[dict]:
    monkeypatch.setattr(kernels, "Clock", Measured)
    case = Case("topk", "128 x 32768", 10.0, list(entries))
    args = Namespace(quick=False, untimed=False, rounds=1, repeats=1)
    return list(kernels.run_section("topk", lambda peers, quick: [case], Peers(None), args))


def test_ours_is_compared_with_the_best_peer(monkeypatch):
    ours, by_hand = entry("minidsa", [30, 20, 25]), entry("minidsa, by hand", [20, 20, 20])
    peers = entry("slow", [100, 100, 100]), entry("quick", [50, 40, 1000])
    rows = {row["entry"]: row for row in rows_of(monkeypatch, ours, by_hand, *peers)}
    assert rows["minidsa"]["ratio"] == 0.5 and rows["minidsa"]["best_peer"] == "quick"
    assert rows["minidsa"]["share_of_floor"] == 0.4
    assert rows["minidsa, by hand"]["ratio"] == 0.4
    assert "ratio" not in rows["quick"] and rows["quick"]["cold_us"] == 50
    table = kernels.table(list(rows.values()))
    assert len(table.splitlines()) == 5 and "0.500" in table


def test_wrong_results_are_told_and_not_timed(monkeypatch):
    def fails() -> str:
        raise RuntimeError("an illegal address")

    broken = Entry("broken", lambda: None, fails)
    rows = rows_of(monkeypatch, entry("minidsa", [3]), entry("off", [1], "wrong 0.5"), broken)
    by_name = {row["entry"]: row for row in rows}
    assert "cold_us" not in by_name["off"] and by_name["off"]["check"] == "wrong 0.5"
    assert by_name["broken"]["check"] == "wrong: RuntimeError: an illegal address"
    assert "ratio" not in by_name["minidsa"], "nothing right to compare with"


def test_floors_and_checks():
    import torch

    assert floor_us(4.28e6) == 1.0
    assert floor_us(4.28e6, 1979e6 * 3, "fp8") == 3.0
    ones = torch.ones(4)
    assert closeness(ones, ones, 1e-9).startswith("ok")
    assert closeness(ones * 1.1, ones, 1e-2) == "wrong 1.0e-01"
    assert closeness(ones * float("nan"), ones, 1.0).startswith("wrong")
    assert worst(["ok a", "wrong b", "ok c"]) == "wrong b" and worst(["ok a", "ok c"]) == "ok c"
