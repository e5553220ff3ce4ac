"""The server on a socket: bounds on heads and bodies, half-open and idle connections, leaving."""

import asyncio
import contextlib
import itertools
import json
import re
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from minidsa.configs.server import LimitsConfig
from minidsa.server.serving import bind, make_listener
from patience import PATIENCE, until
from scripted_engine import EOS, Bed, server_config, serving

HI = {"messages": [{"role": "user", "content": "hi"}]}
LIMITS = LimitsConfig(max_header_bytes=2000, max_body_bytes=5000)


@contextlib.asynccontextmanager
async def listening(bed: Bed) -> AsyncIterator[int]:
    """The bed's application behind the real protocol, on a free port."""
    sock = bind("127.0.0.1", 0)
    listener = make_listener(bed.service)
    task = asyncio.create_task(listener.serve(sockets=[sock]))
    while not listener.started:
        await asyncio.sleep(0.005)
    try:
        yield sock.getsockname()[1]
    finally:
        listener.should_exit = listener.force_exit = True
        await task


async def exchange(port: int, *pieces: bytes, pause: float = 0.0) -> bytes:
    """Send pieces, then read until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            await asyncio.sleep(pause)
        return await asyncio.wait_for(reader.read(), PATIENCE)
    except ConnectionError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def head(*lines: bytes, method: bytes = b"POST /v1/chat/completions") -> bytes:
    return b"\r\n".join((method + b" HTTP/1.1", b"host: x", *lines)) + b"\r\n"


def error_of(answer: bytes, status: int) -> dict:
    top, _, body = answer.partition(b"\r\n\r\n")
    assert top.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
    assert b"application/json" in top and b"connection: close" in top.lower()
    return json.loads(body)["error"]


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("size", [6_000, 60_000, 79_000])
async def test_a_body_over_the_limit_is_read_away_so_that_its_answer_arrives(size, announced):
    """A client that writes all of its body before it reads must see the answer, not a reset."""
    async with serving(config=server_config(limits=LIMITS)) as bed, listening(bed) as port:
        body = b"x" * size
        length = b"content-length: %d" % size if announced else b"transfer-encoding: chunked"
        if not announced:
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (size, body)
        top = head(b"content-type: application/json", length, b"")
        answer = await exchange(port, top, body[:3000], body[3000:], pause=0.05)
        assert error_of(answer, 413)["code"] == "request_too_large"


async def test_a_client_that_asks_first_is_refused_before_it_sends():
    async with serving(config=server_config(limits=LIMITS)) as bed, listening(bed) as port:
        length = b"content-length: 1000000"
        expect = b"expect: 100-continue"
        answer = await exchange(port, head(b"content-type: application/json", length, expect, b""))
        assert error_of(answer, 413)["code"] == "request_too_large"


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_without_end_is_given_up(announced):
    """Where its length says so, at once; else when 16 times the limit were read."""
    async with serving(config=server_config(limits=LIMITS)) as bed, listening(bed) as port:
        length = b"content-length: 80001" if announced else b"transfer-encoding: chunked"
        top = head(b"content-type: application/json", length, b"")
        body = () if announced else (b"%x\r\n%b" % (10**8, b"x" * 80_001),)
        answer = await exchange(port, top, *body, pause=0.05)
        if announced or answer:  # what was sent behind the refusal may reset the connection instead
            error_of(answer, 413)


@pytest.mark.parametrize(
    "pieces",
    [
        (head(b"x: " + b"y" * 3000), b"\r\n"),
        (head(b"x: " + b"y" * 3000),),
        (head(*(b"x%d: y" % i for i in range(400))), b"\r\n"),
        (b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\n\r\n",),
        (b"GET /" + b"a" * 3000,),
    ],
)
async def test_abu_14_a_large_head_is_refused(pieces):
    async with serving(config=server_config(limits=LIMITS)) as bed, listening(bed) as port:
        answer = await exchange(port, *pieces)
        if answer:  # what was sent behind the refusal may reset the connection instead
            assert "2000 bytes" in error_of(answer, 431)["message"]


async def test_abu_14_an_endless_header_is_cut():
    async with serving(config=server_config(limits=LIMITS)) as bed, listening(bed) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(b"x: "))
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 50_000_000 and not reader.at_eof():
                writer.write(b"y" * 1000)
                await writer.drain()
                sent += 1000
        assert sent < 20_000_000
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_abu_15_half_requests_are_closed_and_others_served():
    async with (
        serving(config=server_config(limits=replace(LIMITS, header_seconds=1.0))) as bed,
        listening(bed) as port,
    ):
        halves = [
            asyncio.create_task(exchange(port, head(b"content-type: application/json")))
            for _ in range(200)
        ]
        await asyncio.sleep(0.05)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.post("/v1/chat/completions", json=HI)).status_code == 200
        for answer in await asyncio.gather(*halves):
            error_of(answer, 408)


async def test_a_head_that_trickles_is_closed():
    async with (
        serving(config=server_config(limits=replace(LIMITS, header_seconds=0.2))) as bed,
        listening(bed) as port,
    ):
        pieces = [bytes([byte]) for byte in head(b"content-type: application/json")[:40]]
        start = time.monotonic()
        answer = await exchange(port, *pieces, pause=0.02)
        assert time.monotonic() - start < PATIENCE
        if answer:  # what was sent behind the refusal may reset the connection instead
            error_of(answer, 408)


@pytest.mark.parametrize("size", [1000, 10_000])
async def test_abu_16_bodies_in_chunks_of_one_byte(size):
    async with serving(config=server_config(limits=LIMITS)) as bed, listening(bed) as port:
        start = head(
            b"content-type: application/json", b"transfer-encoding: chunked", b"connection: close"
        )
        answer = await exchange(port, start, b"\r\n", b"1\r\nx\r\n" * size, b"0\r\n\r\n")
        error_of(answer, 400 if size < 5000 else 413)


async def test_a_body_too_large_is_refused_before_it_is_sent():
    async with serving(config=server_config(limits=LIMITS)) as bed, listening(bed) as port:
        start = head(b"content-type: application/json", b"content-length: 999999999")
        error_of(await exchange(port, start, b"\r\n"), 413)


async def test_abu_17_idle_connections_do_not_count():
    async with serving(config=server_config(limits=LIMITS)) as bed, listening(bed) as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            response = await asyncio.wait_for(
                client.post("/v1/chat/completions", json=HI), PATIENCE
            )
            assert response.status_code == 200
        for _, writer in idle:
            writer.close()


@pytest.mark.parametrize("data", [b"\x00\x01\x02\r\n\r\n", b"NONSENSE\r\n\r\n", b"\x16\x03\x01"])
async def test_what_is_not_http_gets_an_error_of_our_shape(data):
    async with serving(config=server_config(limits=LIMITS)) as bed, listening(bed) as port:
        assert error_of(await exchange(port, data), 400)["message"]


CHUNKED = head(b"content-type: application/json", b"transfer-encoding: chunked") + b"\r\n"


@pytest.mark.parametrize(
    "chunks",
    [b"zz\r\n", b'5\r\n{"mes\r\n-1\r\n', b'5\r\n{"messages', b"\r\n", b"99999999999999999999\r\n"],
)
async def test_a_torn_chunked_body_gets_an_answer(chunks):
    async with serving() as bed, listening(bed) as port:
        error = error_of(await exchange(port, CHUNKED, chunks, pause=0.05), 400)
        assert error["type"] == "invalid_request_error" and error["message"]
        assert bed.engine.seen == []


@pytest.mark.parametrize(
    "part",
    [
        CHUNKED + b'5\r\n{"mes\r\n',
        head(b"content-type: application/json", b"content-length: 50") + b'\r\n{"mes',
        b"POST /v1/chat/completions HTT",
    ],
)
async def test_half_a_request_and_the_end_gets_an_answer(part):
    async with serving() as bed, listening(bed) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(part)
        await asyncio.sleep(0.05)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
        assert "before the request was complete" in error_of(answer, 400)["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_abu_22_a_closed_connection_ends_the_request(stream):
    async with (
        serving(lambda submit: itertools.repeat(120), pace=0.005) as bed,
        listening(bed) as port,
    ):
        body = json.dumps(HI | {"stream": stream}).encode()
        request = head(b"content-type: application/json", b"content-length: %d" % len(body))
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request + b"\r\n" + body)
        await until(lambda: bed.engine.num_running)
        # A client that closes its writing side counts as gone.
        writer.write_eof()
        await until(lambda: bed.engine.num_running == 0 and bed.service.generations == {})
        writer.close()


async def test_a_connection_serves_many_requests():
    async with serving(lambda submit: [120, EOS]) as bed, listening(bed) as port:
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits) as client:
            for _ in range(20):
                response = await client.post("/v1/chat/completions", json=HI)
                assert response.status_code == 200
                streamed = await client.post("/v1/chat/completions", json=HI | {"stream": True})
                assert streamed.text.endswith("data: [DONE]\n\n")
            assert (await client.head("/metrics")).status_code == 200
        assert bed.engine.aborts == []


async def test_the_first_bytes_of_a_stream_come_before_the_first_token():
    async with serving(lambda submit: [120, EOS]) as bed, listening(bed) as port:
        bed.engine.held = True
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
            client.stream("POST", "/v1/chat/completions", json=HI | {"stream": True}) as response,
        ):
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["x-accel-buffering"] == "no"
            lines = response.aiter_lines()
            assert '"role":"assistant"' in await asyncio.wait_for(anext(lines), PATIENCE)
            bed.engine.held = False
            assert [line async for line in lines][-2] == "data: [DONE]"


async def test_abu_23_a_reader_that_pauses_keeps_its_text_and_delays_nobody():
    letters = [100 + i % 26 for i in range(200)]
    async with serving(lambda submit: letters) as bed, listening(bed) as port:
        body = {"prompt": "hi", "stream": True, "max_tokens": 200, "return_token_ids": True}
        content = json.dumps(body).encode()
        request = head(
            b"content-type: application/json",
            b"content-length: %d" % len(content),
            b"connection: close",
            method=b"POST /v1/completions",
        )
        paused = []
        for _ in range(20):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
            writer.write(request + b"\r\n" + content)
            paused.append((reader, writer))
        await until(lambda: len(bed.engine.submits) == 20 and not bed.engine.num_running)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (
                await client.post("/v1/chat/completions", json=HI | {"max_tokens": 5})
            ).is_success
        for reader, writer in paused:
            text = (await asyncio.wait_for(reader.read(), PATIENCE)).decode()
            ids = [
                int(i)
                for found in re.findall(r'"token_ids":\[([^]]+)\]', text)
                for i in found.split(",")
            ]
            assert ids[-200:] == letters
            assert "data: [DONE]" in text
            writer.close()
