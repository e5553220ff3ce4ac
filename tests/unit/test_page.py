"""The chat page as it is served: whole, from here alone, and true of the API that it calls.

That it works is for a browser to say: `make page` (tests/page/browser.py).
"""

import re

import pytest

from minidsa.server.page import PAGE_FILES
from scripted_engine import server_config, serving


async def page_files() -> dict[str, str]:
    async with serving() as bed:
        return {path: (await bed.client.get(path)).text for path in PAGE_FILES}


@pytest.mark.parametrize("path", PAGE_FILES)
async def test_files_are_served_without_a_key_and_with_a_policy(path):
    async with serving(config=server_config(api_key="secret")) as bed:
        response = await bed.client.get(path)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} <= set(policy)
        assert "unsafe" not in response.headers["content-security-policy"]
        kind = {"css": "text/css", "js": "text/javascript"}.get(
            path.rpartition(".")[2], "text/html"
        )
        assert response.headers["content-type"].startswith(kind)
        assert response.headers["x-content-type-options"] == "nosniff"


async def test_nothing_comes_from_outside_and_nothing_is_missing():
    files = await page_files()
    for text in files.values():
        urls = [url for url in re.findall(r"https?://[^\s\"')]+", text) if "w3.org" not in url]
        assert urls == [] and "@import" not in text
        for name in re.findall(r"(?:src|href)=\"([^\"]+)\"|from \"\./([^\"]+)\"", text):
            (target,) = filter(None, name)
            assert f"/{target}" in files or target in ("data:,", "openapi.json"), target


async def test_the_page_obeys_its_own_policy():
    """No handler or style inside of the markup, and nothing that reads text as markup."""
    files = await page_files()
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?! type=\"module\" src)", files["/"])
    scripts = "".join(text for path, text in files.items() if path.endswith(".js"))
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", scripts
    )


async def test_every_control_has_a_name_and_every_id_exists():
    files = await page_files()
    page = files["/"]
    ids = set(re.findall(r"\bid=\"([^\"]+)\"", page))
    for path, text in files.items():
        if path.endswith(".js"):
            assert set(re.findall(r"(?:element|getElementById)\(\"([^\"]+)\"\)", text)) <= ids
    labelled = set(re.findall(r"<label for=\"([^\"]+)\"", page))
    inside = "".join(re.findall(r"<label[^>]*>[^<]*<(?:input|textarea) name=\"(\w+)\"", page))
    for attributes in re.findall(r"<(?:input|textarea)([^>]*)>", page):
        (name,) = re.findall(r"(?:id|name)=\"([^\"]+)\"", attributes)[:1]
        assert name in labelled or name in inside, name


async def test_the_charts_read_metrics_that_exist():
    async with serving() as bed:
        script = (await bed.client.get("/engine.js")).text
        names = set(
            re.findall(r"\"((?:num|kv|prefix|spec|engine|generation|prompt)_\w+)\"", script)
        )
        assert len(names) >= 10
        text = (await bed.client.get("/metrics")).text
        found = set(re.findall(r"^minidsa:(\w+)\{", text, re.MULTILINE))
        assert {name for name in names - found if not name.startswith("spec_decode")} == set()
