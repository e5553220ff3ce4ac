"""API keys: several of them, with limits of their own, and answers that belong to their key."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from minidsa.server.errors import ApiError
from minidsa.server.keys import Key, KeyEntry, read_keyring
from patience import until
from scripted_engine import EOS, Bed, server_config, serving

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.fixture
def file(tmp_path) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(
        '[alice]\nkey = "first"\nrequests_per_minute = 2\n[bob]\nkey = "second"\n'
        "requests_at_once = 1\n"
    )
    return str(path)


async def ask(bed: Bed, key: str, path: str = CHAT) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return (await bed.client.post(path, json=BODY, headers=headers)).status_code


async def test_every_key_is_taken_and_no_other(file):
    config = server_config(api_key="main", api_key_file=file)
    async with serving(lambda submit: [120, EOS], config=config) as bed:
        found = [await ask(bed, key) for key in ("main", "first", "second", "third", "")]
        assert found == [200, 200, 200, 401, 401]
        headers = {"x-api-key": "main"}
        text = (await bed.client.get("/server_info", headers=headers)).text
        assert "keys.toml" not in text and '"api_key_file":"set"' in text


async def test_a_rate_is_refused_as_429_with_its_time(file):
    async with serving(lambda submit: [120, EOS], config=server_config(api_key_file=file)) as bed:
        assert [await ask(bed, "first") for _ in range(3)] == [200, 200, 429]
        for path, shape in ((CHAT, {"error"}), ("/v1/messages", {"type", "error", "request_id"})):
            headers = {"x-api-key": "first"}
            refused = await bed.client.post(path, json=BODY, headers=headers)
            assert refused.status_code == 429
            assert 1 <= int(refused.headers["retry-after"]) <= 30
            assert set(refused.json()) == shape
            assert refused.json()["error"]["type"] == "rate_limit_error"
        assert "2 requests a minute" in refused.json()["error"]["message"]
        assert await ask(bed, "second") == 200
        # What needs no key has no limit either.
        assert (await bed.client.get("/health", headers=headers)).status_code == 200


async def test_only_requests_that_generate_count(file):
    async with serving(lambda submit: [120, EOS], config=server_config(api_key_file=file)) as bed:
        headers = {"authorization": "Bearer first"}
        for path in ("/v1/models", "/metrics", "/server_info") * 3:
            assert (await bed.client.get(path, headers=headers)).status_code == 200
        assert [await ask(bed, "first") for _ in range(3)] == [200, 200, 429]
        assert (await bed.client.get("/metrics", headers=headers)).status_code == 200


async def test_requests_at_once_are_counted_until_they_end(file):
    async with serving(lambda submit: [120, EOS], config=server_config(api_key_file=file)) as bed:
        bed.engine.held = True
        running = asyncio.create_task(ask(bed, "second"))
        await until(lambda: bed.engine.num_running)
        assert await ask(bed, "second") == 429
        bed.engine.held = False
        assert await running == 200
        assert await ask(bed, "second") == 200


async def test_a_key_ends_its_own_requests_only(file):
    config = server_config(api_key="main", api_key_file=file)
    async with serving(lambda submit: [120] * 10**6, pace=0.005, config=config) as bed:

        async def abort(key: str, **body: object) -> tuple[int, object]:
            headers = {"authorization": f"Bearer {key}"}
            answer = await bed.client.post("/abort", json=body, headers=headers)
            return answer.status_code, answer.json().get("aborted")

        headers = {"authorization": "Bearer main", "x-request-id": "mine"}
        body = {"messages": BODY["messages"]}
        running = asyncio.create_task(bed.client.post(CHAT, json=body, headers=headers))
        await until(lambda: bed.engine.num_running == 1)
        assert await abort("second", request_id="mine") == (404, None)
        assert await abort("second", all=True) == (200, 0)
        assert bed.engine.num_running == 1
        assert await abort("main", request_id="mine") == (200, 1)
        assert (await running).json()["choices"][0]["finish_reason"] == "abort"


def test_the_bucket_fills_again_and_never_overflows():
    now = [0.0]
    key = Key(KeyEntry("x", requests_per_minute=2), clock=lambda: now[0])

    def is_taken() -> bool:
        with contextlib.suppress(ApiError):
            key.enter()
            key.leave()
            return True
        return False

    assert [is_taken() for _ in range(3)] == [True, True, False]
    now[0] = 29.0
    assert not is_taken()
    now[0] = 30.0
    assert [is_taken() for _ in range(2)] == [True, False]
    now[0] = 10_000.0
    assert [is_taken() for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "names no key"),
        ("[a]\n", "key"),
        ('[a]\nkey = ""', "the key of a is empty"),
        ('[a]\nkey = " x"', "begins or ends with a space"),
        ('[a]\nkey = "x"\n[b]\nkey = "x"', "two names"),
        ('[a]\nkey = "x"\nrequests_per_minute = -1', "negative"),
        ('[a]\nkey = "x"\nrate = 1', "rate"),
        ("key = ", "keys.toml"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(tmp_path: Path, text: str, part: str):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match="api_key_file") as caught:
        read_keyring(None, str(path))
    assert part in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="No such file"):
        read_keyring(None, str(tmp_path / "none"))


async def test_stored_responses_belong_to_their_key(file):
    async with serving(lambda submit: [120, EOS], config=server_config(api_key_file=file)) as bed:
        first, second = ({"x-api-key": key} for key in ("first", "second"))
        body = {"input": "x", "max_output_tokens": 1}
        stored = (await bed.client.post("/v1/responses", json=body, headers=second)).json()["id"]
        path = f"/v1/responses/{stored}"
        assert (await bed.client.get(path, headers=first)).status_code == 404
        assert (await bed.client.get(path, headers=second)).status_code == 200


async def test_cors_is_off_unless_an_origin_is_named():
    preflight = {"origin": "http://page", "access-control-request-method": "POST"}
    async with serving() as bed:
        answer = await bed.client.options(CHAT, headers=preflight)
        assert answer.status_code == 405
        answer = await bed.client.get("/v1/models", headers={"origin": "http://page"})
        assert not any(name.startswith("access-control") for name in answer.headers)
    config = server_config(api_key="k", cors_origins="http://page, http://other")
    async with serving(config=config) as bed:
        answer = await bed.client.options(CHAT, headers=preflight)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "http://page"
        assert await ask(bed, "wrong") == 401
        stranger = preflight | {"origin": "http://evil"}
        answer = await bed.client.options(CHAT, headers=stranger)
        assert "access-control-allow-origin" not in answer.headers
