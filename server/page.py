"""The chat page at `/`: a few files as they are, with nothing from outside and nothing built.

The files hold no secrets, so they are served without a key; the page asks for one and sends it with
its requests.
"""

from pathlib import Path
from types import MappingProxyType

from fastapi import APIRouter, Response

_DIRECTORY = Path(__file__).with_name("static")
_SCRIPT = "text/javascript; charset=utf-8"
PAGE_FILES = MappingProxyType(
    {
        "/": ("index.html", "text/html; charset=utf-8"),
        "/page.css": ("page.css", "text/css; charset=utf-8"),
        "/page.js": ("page.js", _SCRIPT),
        "/chat.js": ("chat.js", _SCRIPT),
        "/engine.js": ("engine.js", _SCRIPT),
    }
)
"""File and media type by path."""
# A model writes what it likes; were its text ever taken for markup, it could load and run nothing.
_HEADERS = MappingProxyType(
    {
        "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        # An upgraded server must not meet the scripts of the one before it.
        "cache-control": "no-cache",
    }
)


def page_routes() -> APIRouter:
    """The routes of the page; only `/` is part of the API's description."""
    router = APIRouter()
    for path, (name, media_type) in PAGE_FILES.items():
        router.add_api_route(
            path,
            _File(_DIRECTORY / name, media_type).send,
            methods=["GET"],
            include_in_schema=path == "/",
        )
    return router


class _File:
    """A file that was read once, at the start."""

    def __init__(self, path: Path, media_type: str) -> None:
        self._content = path.read_bytes()
        self._media_type = media_type

    async def send(self) -> Response:
        return Response(self._content, media_type=self._media_type, headers=dict(_HEADERS))
