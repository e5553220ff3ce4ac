"""The page in a browser, as somebody uses it: `make page`. Needs Chromium.

    python tests/page/browser.py [--program chromium] [--pictures DIRECTORY]

It serves the small checkpoint, once with a key, and leaves pictures to look at.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "e2e")]

from server_process import SMALL, ServerProcess  # noqa: E402  # pyright: ignore

from page.chromium import Page, chromium  # noqa: E402  (the two lines above find them)

CHECKPOINT = str(Path(__file__).parents[2] / "checkpoints" / "tiny-dsa")
ENTER, ESCAPE, RIGHT, LEFT = (
    ("Enter", 13, "\r"),
    ("Escape", 27),
    ("ArrowRight", 39),
    ("ArrowLeft", 37),
)
IDLE = "document.getElementById('stop').disabled"


def give_key(page: Page, key: str) -> None:
    page.until("!document.getElementById('key-form').hidden")
    page.run("document.getElementById('key').focus()")
    page.write(key)
    page.press(*ENTER)


def say(page: Page, text: str) -> None:
    """Written and sent by keyboard alone."""
    page.run("document.getElementById('prompt').focus()")
    page.write(text)
    page.press(*ENTER)


def chat(page: Page, pictures: Path) -> None:
    say(page, "What is the capital of Norway?")
    page.until(f"{IDLE} && document.querySelector('.assistant .counts').textContent")
    answer = page.run("document.querySelector('.assistant > .text').textContent")
    counts = page.run("document.querySelector('.assistant .counts').textContent")
    print(f"answer: {answer}\ncounts: {counts}")
    assert "Oslo" in answer and "tokens/s" in counts and "drafts accepted" in counts
    assert page.run("document.activeElement.id") == "prompt"
    page.picture(pictures / "chat-light.png")


def think(page: Page, pictures: Path) -> None:
    page.run("document.querySelector('#ask details').open = true")
    page.run("document.querySelector('[name=thinking]').click()")
    page.run("document.querySelector('[name=temperature]').value = 0")
    say(page, "What is the capital of France?")
    page.until(f"{IDLE} && document.querySelectorAll('.assistant .counts')[1]?.textContent")
    assert not page.run("document.querySelectorAll('.thoughts')[1].hidden")
    assert not page.run("document.querySelectorAll('.thoughts')[1].open")
    page.run("document.querySelectorAll('.thoughts')[1].open = true")
    page.darken("dark")
    page.picture(pictures / "chat-dark.png")
    page.run("document.querySelector('[name=thinking]').click()")


def stop(page: Page) -> None:
    page.run("document.querySelector('#ask details').open = false")
    say(page, "Tell me a story about Mira and a fox.")
    page.until("document.querySelectorAll('.assistant > .text')[2]?.textContent")
    page.press(*ESCAPE)
    page.until(IDLE)
    print(f"status: {page.run('document.getElementById(`status`).textContent')}")


def refuse(page: Page) -> None:
    page.run("document.querySelector('#ask details').open = false")
    page.run("document.querySelector('[name=temperature]').value = 5")
    say(page, "hi")
    # The fold that holds the wrong field opens, so that it can be seen.
    page.until("document.querySelector('#ask details').open")
    page.run("document.querySelector('[name=temperature]').value = 0")
    page.run("document.querySelector('#prompt').value = ''")
    page.run("document.querySelector('#prompt').focus()")
    page.run("document.querySelector('[name=max_tokens]').value = 99999")
    say(page, "hi")
    page.until("document.querySelector('.error')")
    assert "max_tokens" in page.run("document.querySelector('.error').textContent")
    page.run("document.querySelector('[name=max_tokens]').value = ''")
    page.errors[:] = [text for text in page.errors if "400" not in text]


def watch(page: Page, pictures: Path) -> None:
    page.run("document.getElementById('chat-tab').focus()")
    page.press(*RIGHT)
    page.until("!document.getElementById('engine').hidden")
    # Three readings while something is computed.
    page.run("""window.asked = fetch('v1/completions', {method: 'POST', headers: {
        'Content-Type': 'application/json',
        Authorization: 'Bearer ' + sessionStorage.getItem('minidsa-key')},
        body: JSON.stringify({prompt: 'a', max_tokens: 300, ignore_eos: true})
    }).then(response => response.status); 0""")
    page.until("document.querySelectorAll('polyline').length >= 8")
    page.until("document.querySelector('polyline').getAttribute('points').split(' ').length >= 4")
    assert page.run("window.asked") == 200
    charts = page.run(
        "[...document.querySelectorAll('svg')].map(s => s.getAttribute('aria-label'))"
    )
    print("\n".join(charts))
    page.picture(pictures / "engine-dark.png")
    page.press(*LEFT)
    page.until("document.getElementById('engine').hidden")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", default="chromium")
    parser.add_argument("--pictures", type=Path, default=Path(tempfile.gettempdir()))
    chosen = parser.parse_args()
    server = ServerProcess(CHECKPOINT, *SMALL, "--api-key", "hush")
    try:
        with chromium(chosen.program) as page:
            page.open(server.url)
            give_key(page, "wrong")
            page.until("document.getElementById('key-note').textContent.includes('refused')")
            give_key(page, "hush")
            page.until("document.getElementById('model').textContent === 'tiny-dsa'")
            assert page.run("document.getElementById('key-form').hidden")
            page.errors[:] = [text for text in page.errors if "401" not in text]
            chat(page, chosen.pictures)
            think(page, chosen.pictures)
            stop(page)
            refuse(page)
            named = page.names()
            nameless = [role for role, name in named if role in ("button", "textbox") and not name]
            assert nameless == [] and ("tab", "Engine") in named
            watch(page, chosen.pictures)
            assert page.errors == [], page.errors
        assert server.stop() == 0
    finally:
        server.kill()
    print(f"the page works; pictures are in {chosen.pictures}")


if __name__ == "__main__":
    main()
