"""`minidsa chat` and `minidsa bench` against a small server that answers by script."""

import json
import math
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from xml.etree import ElementTree

import pytest

from minidsa.server.bench_command import Load, Timing, bench, summary
from minidsa.server.bench_plot import plot
from minidsa.server.chat_command import Terminal, chat
from minidsa.server.cli import main
from minidsa.server.http_client import CallFailed, ServerAddress
from patience import PATIENCE

Reply = Callable[[dict[str, Any]], tuple[int, bytes]]
USAGE = {"prompt_tokens": 3, "completion_tokens": 4}


def stream_of(*events: object, done: bool = True) -> bytes:
    lines = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    # Comment lines are for proxies; a client passes over them.
    return b": still here\n\n" + lines + (b"data: [DONE]\n\n" if done else b"")


@contextmanager
def answering(reply: Reply) -> Iterator[tuple[ServerAddress, list[dict[str, Any]]]]:
    """A server whose POSTs are answered by `reply`; also the bodies that it got."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, json.dumps({"data": [{"id": "small"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append(body | {"authorization": self.headers["authorization"]})
            # Some clients are interrupted before their answer.
            with suppress(ConnectionError):
                self._send(*reply(body))

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: stderr is for failures."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield ServerAddress(f"http://127.0.0.1:{server.server_port}", "key"), seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def spoken(text: str, thought: str = "") -> bytes:
    deltas = [{"reasoning_content": thought}, {"content": text}]
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    return stream_of(*events, {"choices": [], "usage": USAGE})


def talk(address: ServerAddress, *lines: str, system: str | None = None) -> str:
    shown: list[str] = []
    assert chat(address, {"temperature": 0}, system, lines, Terminal(shown.append)) == 0
    return "".join(shown)


def test_chat_remembers_its_turns_and_forgets_on_new():
    with answering(lambda body: (200, spoken("yes", "hm"))) as (address, seen):
        shown = talk(address, "one", "", "two", "/new", "three", system="be short")
    contents = [[message["content"] for message in body["messages"]] for body in seen]
    assert contents == [
        ["be short", "one"], ["be short", "one", "yes", "two"], ["be short", "three"],
    ]  # fmt: skip
    assert all(body["authorization"] == "Bearer key" and body["temperature"] == 0 for body in seen)
    assert "hm\nyes" in shown and "3 + 4 tokens" in shown


def test_chat_shows_an_error_and_goes_on():
    failure = json.dumps({"error": {"message": "too long"}}).encode()
    broken = stream_of({"error": {"message": "the engine is gone"}})
    replies = iter([(400, failure), (200, broken), (200, spoken("yes"))])
    with answering(lambda body: next(replies)) as (address, seen):
        shown = talk(address, "one", "two", "three")
    assert "HTTP 400: too long" in shown and "the engine is gone" in shown and "yes" in shown
    assert [len(body["messages"]) for body in seen] == [1, 1, 1]


def test_chat_keeps_control_characters_from_the_terminal():
    with answering(lambda body: (200, spoken("a\x1b[2Jb\x9bc"))) as (address, _):
        shown = talk(address, "one")
    assert "a[2Jbc" in shown and "\x1b" not in shown


def test_a_stream_without_its_end_is_a_failure():
    cut = stream_of({"choices": []}, done=False)
    with (
        answering(lambda body: (200, cut)) as (address, _),
        pytest.raises(CallFailed, match="DONE"),
    ):
        list(address.stream("/v1/completions", {}))


def test_a_reader_that_leaves_ends_a_command_quietly():
    command = (sys.executable, "-m", "minidsa.server.cli", "plan", "--device", "cpu")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as plan:
        assert plan.stdout is not None
        plan.stdout.close()
        _, errors = plan.communicate(timeout=PATIENCE)
    assert (plan.returncode, errors) == (0, "")


def completion(body: dict[str, Any]) -> tuple[int, bytes]:
    events = [{"choices": [{"text": "x"}]} for _ in range(4)]
    return 200, stream_of(*events, {"choices": [], "usage": USAGE})


@pytest.mark.parametrize("rate", [None, 500.0])
def test_bench_times_every_request(rate):
    with answering(completion) as (address, seen):
        report = bench(address, Load(num_requests=6, concurrency=2, rate=rate), lambda line: None)
    assert (report["completed"], report["failed"], len(seen)) == (6, 0, 6)
    assert report["tokens_per_second"] == pytest.approx(24 / report["seconds"])
    prompts = 6 * USAGE["prompt_tokens"]
    assert report["prompt_tokens_per_second"] == pytest.approx(prompts / report["seconds"])
    assert all(
        value >= 0 for values in report["milliseconds"].values() for value in values.values()
    )
    assert len({body["prompt"] for body in seen}) == 6


def test_bench_counts_failures_and_refuses_a_run_of_nothing_else():
    count = iter(range(100))
    sometimes = [(500, b"oops"), None]
    with answering(lambda body: sometimes[next(count) % 2] or completion(body)) as (address, _):
        report = bench(address, Load(num_requests=4, concurrency=1), lambda line: None)
    assert (report["completed"], report["failed"]) == (2, 2)
    assert report["errors"] == ["HTTP 500: oops"]
    with answering(lambda body: (500, b"oops")) as (address, _), pytest.raises(CallFailed):
        bench(address, Load(num_requests=2), lambda line: None)


@pytest.mark.parametrize("rate", [(), ("--rate", "500")])
def test_an_interrupted_bench_leaves_at_once_and_says_nothing(rate):
    seen, released = threading.Event(), threading.Event()

    def silent(body: dict[str, Any]) -> tuple[int, bytes]:
        seen.set()
        released.wait(PATIENCE)
        return 200, b""

    def hears_interrupts() -> None:
        """Jobs in the background of a shell ignore them, and so do the children of tests there."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with answering(silent) as (address, _):
        command = (sys.executable, "-m", "minidsa.server.cli", "bench", "--url", address.url, *rate)
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, preexec_fn=hears_interrupts
        ) as bench:
            try:
                assert seen.wait(PATIENCE)
                bench.send_signal(signal.SIGINT)
                _, errors = bench.communicate(timeout=PATIENCE / 2)
            finally:
                bench.kill()
                released.set()
    assert (bench.returncode, errors) == (130, "")


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"error": {"message": "it broke"}}, "it broke"),
        ({"error": "it broke"}, "it broke"),
        ([1], "no JSON object"),
        ({"id": "x"}, "no completion's: KeyError"),
        ({"choices": [{"delta": {}}]}, "no completion's: KeyError"),
        ({"choices": None}, "no completion's: TypeError"),
    ],
)
def test_events_of_another_shape_are_told_in_one_line(event, words):
    with (
        answering(lambda body: (200, stream_of(event))) as (address, _),
        pytest.raises(CallFailed, match=words),
    ):
        bench(address, Load(num_requests=1), lambda line: None)


def test_percentiles_are_times_that_were_measured_and_goodput_needs_both_limits():
    timings = [Timing(ttft=i / 10, e2e=i / 10 + 0.9, num_tokens=10) for i in range(1, 11)]
    timings += [Timing(ttft=0.1, e2e=99.0, num_tokens=10), Timing(error="gone")]
    report = summary(timings, 2.0, Load(ttft_limit=0.5, tpot_limit=0.2))
    assert report["milliseconds"]["ttft"] == pytest.approx({"p50": 500, "p90": 900, "p99": 1000})
    assert report["goodput_per_second"] == 2.5
    assert report["milliseconds"]["itl"]["p50"] is None
    assert math.isclose(report["requests_per_second"], 5.5)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("chat", "--url", "http://127.0.0.1:1"), 1, "refused"),
        (("bench", "--url", "nowhere"), 1, "no address"),
        (("bench", "--url", "http://127.0.0.1:x"), 1, "no address"),
        (("bench", "--rate", "-1"), 2, "--rate"),
        (("bench", "--rate", "inf"), 2, "--rate is inf"),
        (("bench", "--rate", "1e-300"), 2, "at least 0.001"),
        (("bench", "--output", "/nowhere/at/all.json"), 2, "no folder /nowhere/at"),
        (("bench", "--num-request", "3"), 2, "--num-requests"),
    ],
)
def test_mistakes_are_one_line(arguments, code, word, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    error = capsys.readouterr().err
    assert left.value.code == code and word in error and error.count("\n") == 1


def test_a_run_is_plotted_as_one_curve_a_measure(tmp_path, capsys):
    timings = [Timing(0.1 * i, i, [0.01, 0.02], 3) for i in (1, 2, 3)] + [Timing(error="x")]
    drawn = ElementTree.fromstring(plot(summary(timings, 2.0, Load())))
    curves = [e.get("points", "").split() for e in drawn.iter() if e.tag.endswith("polyline")]
    assert [len(points) for points in curves] == [101] * 4
    for points in curves:
        places = [tuple(map(float, point.split(","))) for point in points]
        assert places == sorted(places, key=lambda place: (place[0], -place[1]))
    # A run without an answer has an empty picture, and no error.
    assert "polyline" in plot(summary([Timing(error="x")], 1.0, Load(rate=2.0)))
    with answering(lambda body: (200, stream_of({"choices": [{"text": "a"}]}))) as (address, _):
        file = tmp_path / "run.svg"
        arguments = ["bench", "--url", address.url, "--num-requests", "2", "--plot", str(file)]
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        assert file.read_text().startswith("<svg")
        with pytest.raises(SystemExit, match="2"):
            main([*arguments[:-1], str(tmp_path / "no" / "folder.svg")])
    assert "--plot" in capsys.readouterr().err


def test_standard_streams_that_were_closed_are_the_null_device():
    """Else the first sockets would be streams to whatever writes to one, and end in an abort."""
    code = """
import os, sys
from minidsa.server.cli import main
try:
    main(["version"])
except SystemExit:
    print(*(os.readlink(f"/proc/self/fd/{n}") for n in (0, 1)), file=sys.stderr)
    print(*(os.get_inheritable(n) for n in (0, 1)), sys.stdin.read() == "", file=sys.stderr)
"""
    shell = ("sh", "-c", 'exec "$0" -c "$1" <&- >&-', sys.executable, code)
    done = subprocess.run(shell, check=True, capture_output=True, text=True)
    assert done.stderr == "/dev/null /dev/null\nTrue True True\n"


def test_a_line_that_is_typed_can_be_edited():
    """Arrow left, then a letter: it stands in the middle of the line."""
    terminal, its_end = pty.openpty()
    script = "from minidsa.server.client_commands import _lines; print(repr(next(_lines())))"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=its_end,
        stdout=its_end,
        env={**os.environ, "TERM": "xterm"},
        start_new_session=True,
    ) as process:
        os.close(its_end)
        shown = b""
        while b"> " not in shown:
            shown += os.read(terminal, 1000)
        os.write(terminal, b"ac\x1b[Db\n")
        # What is still unread when the other end closes would be lost on some systems.
        while b"'" not in shown.partition(b"\r\n")[2]:
            shown += os.read(terminal, 1000)
        assert process.wait(timeout=PATIENCE) == 0
    os.close(terminal)
    assert b"'abc'" in shown
