"""Stop strings: found the same however the text is cut, and no part of one leaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidsa.server.stops import StopMatch, StopMatcher

stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)
texts = st.text("abc", max_size=40)


def first_match(text: str, stops: list[str]) -> StopMatch | None:
    """By the definition: earliest end, then longest."""
    found = [
        StopMatch(stop, end - len(stop), end)
        for stop in stops
        for end in range(len(stop), len(text) + 1)
        if text[end - len(stop) : end] == stop
    ]
    return min(found, key=lambda m: (m.end, m.start), default=None)


def run(pieces: list[str], stops: list[str], include: bool = False):
    matcher = StopMatcher(stops, include)
    shown = [matcher.push(piece) for piece in pieces]
    return "".join([*shown, matcher.flush()]), matcher.match


@given(texts, stop_lists, st.booleans(), st.data())
def test_any_split_gives_the_definition(text, stops, include, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    match = first_match(text, stops)
    shown = text if match is None else text[: match.end if include else match.start]
    assert run(pieces, stops, include) == (shown, match)


@given(texts, stop_lists)
def test_only_what_may_become_a_stop_is_held_back(text, stops):
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(character) for character in text)
    if matcher.match is None:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


@given(texts, stop_lists, st.integers(0, 40))
def test_stops_before_min_tokens_pass(text, stops, unarmed):
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(c, armed=i >= unarmed) for i, c in enumerate(text))
    shown += matcher.flush()
    expected = None
    for end in range(len(text), unarmed, -1):
        stop = max((s for s in stops if text[:end].endswith(s)), key=len, default=None)
        if stop is not None:
            expected = StopMatch(stop, end - len(stop), end)
    assert matcher.match == expected
    assert shown == (text if expected is None else text[: expected.start])


def test_api_30_the_stop_is_left_out():
    assert run(["one, two"], [","]) == ("one", StopMatch(",", 3, 4))


def test_api_31_no_part_of_a_stop_over_several_tokens_leaves():
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ["a E", "N", "D b"]] == ["a ", "", ""]
    assert matcher.match == StopMatch("END", 2, 5)
    assert matcher.push("more") == ""


def test_a_stop_that_fails_is_released():
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ["E", "N", "x"]] == ["", "", "ENx"]
    assert matcher.match is None


def test_api_32_the_stop_is_kept_where_asked():
    assert run(["a E", "ND b"], ["END"], include=True)[0] == "a END"


def test_the_match_that_completes_first_wins_and_ties_go_to_the_longer():
    assert run(["abcd"], ["abcd", "bc"])[1] == StopMatch("bc", 1, 3)
    assert run(["abcd"], ["bc", "abc"])[1] == StopMatch("abc", 0, 3)


def test_http_11_a_match_tells_where_it_ends():
    assert run(["abcd"], ["b"]) == ("a", StopMatch("b", 1, 2))


def test_no_stops_hold_nothing_back():
    matcher = StopMatcher([])
    assert matcher.push("abc") == "abc"


def test_api_33_an_empty_stop_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])
