"""The commands' own client of a running server: a request, and the events of a streamed answer.

`minidsa chat` and `minidsa bench` speak to any server with OpenAI's API through it; the standard
library is enough for one request at a time in one thread.
"""

import http.client
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from .flag_table import KEY_VARIABLE

_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 600.0


class CallFailed(Exception):
    """The server was not reached, or it answered with an error; the text is one line."""


def _key() -> str | None:
    return os.environ.get(KEY_VARIABLE)


@dataclass(frozen=True)
class ServerAddress:
    """Where a server is, such as http://127.0.0.1:8000, and the key it asks for."""

    url: str
    key: str | None = field(default_factory=_key, repr=False)

    def get(self, path: str) -> Any:
        """The JSON that a route answers; raises CallFailed."""
        connection = self._connect()
        try:
            return json.loads(self._answer(connection, "GET", path, None).read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise CallFailed(f"{self.url}{path}: {error}") from None
        finally:
            connection.close()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer as they come; raises CallFailed, also in the middle."""
        connection = self._connect()
        try:
            response = self._answer(connection, "POST", path, json.dumps(body).encode())
            is_whole = False
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    is_whole = True
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if not isinstance(event, dict):
                        raise ValueError("an event of the stream is no JSON object")
                    if (error := event.get("error")) is not None:
                        is_described = isinstance(error, dict) and "message" in error
                        raise CallFailed(str(error["message"] if is_described else error))
                    yield event
            if not is_whole:
                raise CallFailed("the stream ended before its [DONE]")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise CallFailed(f"{self.url}{path}: {error}") from None
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        wrong = CallFailed(f"{self.url} is no address; write it as http://127.0.0.1:8000")
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError:
            raise wrong from None
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        if parts.scheme not in kinds or not parts.hostname:
            raise wrong
        return kinds[parts.scheme](parts.hostname, port, timeout=_CONNECT_SECONDS)

    def _answer(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        headers = {"content-type": "application/json"}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        connection.connect()
        connection.sock.settimeout(_ANSWER_SECONDS)
        connection.request(method, urlsplit(self.url).path.rstrip("/") + path, body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise CallFailed(_reason(response.status, response.read()))
        return response


def _reason(status: int, body: bytes) -> str:
    try:
        return f"HTTP {status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}: {body[:200].decode(errors='replace')}"
