"""A saved prefix through the real server: saved, forgotten, restored, found."""

import httpx
import pytest
from server_process import SMALL, ServerProcess

from patience import PATIENCE

TEXT = "Pages that nobody holds are given up in the order of their last use. " * 3

pytestmark = pytest.mark.slow


def test_a_restored_session_is_a_hit_with_equal_text(checkpoint, tmp_path):
    folder = tmp_path / "sessions"
    server = ServerProcess(str(checkpoint), *SMALL, "--session-dir", str(folder))
    try:
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:

            def post(path, **body):
                response = client.post(path, json=body)
                assert response.status_code == 200, response.text
                return response.json()

            def ask():
                body = {"prompt": TEXT, "max_tokens": 8, "temperature": 0}
                answer = post("/v1/completions", **body)
                details = answer["usage"]["prompt_tokens_details"]
                return answer["choices"][0]["text"], details["cached_tokens"]

            cold, cached = ask()
            assert cached == 0
            saved = post("/v1/sessions/talk.1/save", prompt=TEXT)
            assert (folder / "talk.1.safetensors").is_file()
            server.wait_idle()
            post("/flush_cache")
            assert post("/v1/sessions/talk.1/restore") == saved
            warm, cached = ask()
            assert warm == cold and cached >= saved["num_tokens"] - 16 > 0
            refused = client.post("/v1/sessions/other/restore", json={})
            assert refused.status_code == 409
            assert refused.json()["error"]["message"] == "there is no session other"
    finally:
        server.kill()
