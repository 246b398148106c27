"""Who may use the server: names of hosts, origins of pages, keys, requests per minute."""

from collections.abc import MutableMapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from imputer.server.failures import Failure
from imputer.server.keys import Keys, RateLimit
from imputer.server.settings import Settings

Headers = MutableMapping[bytes, bytes]

SOCKET_KEY = "openai-insecure-api-key."


class Access:
    """The checks that a request passes before its body is read."""

    def __init__(self, settings: Settings) -> None:
        self.keys = Keys(settings)
        self.rate = RateLimit(settings.requests_per_minute)
        self.hosts = {host.lower() for host in settings.allow_hosts}
        self.origins = {origin.lower().rstrip("/") for origin in settings.allow_origins}

    def check_host(self, header: bytes | None) -> None:
        """Refuse unknown host names, against DNS rebinding."""
        if header is None or "*" in self.hosts:
            return
        name = host_name(header.decode("latin-1"))
        if name == "localhost" or name in self.hosts or _is_address(name):
            return
        raise Failure(
            421,
            f"unknown host {name[:80]!r}; if it is this server, start it with --allow-host {name[:80]}",
            code="unknown_host",
        )

    def allows_origin(self, origin: str) -> bool:
        return "*" in self.origins or origin.lower() in self.origins

    def check_origin(self, headers: Headers) -> None:
        """Refuse requests that a page of another site makes a browser send."""
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and self.allows_origin(origin):
            return
        host = headers.get(b"host", b"").decode("latin-1").lower()
        foreign = bool(origin) and _authority(origin) != host
        if foreign or headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            raise Failure(
                403,
                "pages of other sites may not use this server; allow one with --allow-origin",
                code="cross_origin",
            )

    def client(self, header: bytes, address: str) -> str:
        """The unit of rate limits: a valid key, or an address where there are no keys."""
        return self.keys.check(header) if self.keys else address

    def cors(self, headers: Headers) -> dict[str, str]:
        """Headers that let a page of an allowed origin read the answer."""
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin or not self.allows_origin(origin):
            return {}
        return {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": "x-request-id, retry-after",
            "cross-origin-resource-policy": "cross-origin",
            "vary": "origin",
        }

    def preflight(self, headers: Headers) -> dict[str, str]:
        """Headers that let a page of an allowed origin send a request."""
        if not self.cors(headers):
            return {}
        wanted = headers.get(b"access-control-request-headers", b"").decode("latin-1")
        return {
            "access-control-allow-methods": "GET, HEAD, POST, OPTIONS",
            "access-control-allow-headers": wanted or "authorization, content-type",
            "access-control-max-age": "600",
        }


def socket_key(scope: MutableMapping[str, Any]) -> bytes:
    """The key as a header; browsers cannot set headers of a WebSocket, so OpenAI's clients name it as a protocol."""
    for name in scope.get("subprotocols", []):
        if name.startswith(SOCKET_KEY):
            return b"Bearer " + name.removeprefix(SOCKET_KEY).encode()
    return b""


def host_name(header: str) -> str:
    """The name in a Host header, without its port and the brackets of an address."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].rstrip(".")


def _authority(origin: str) -> str | None:
    """Host and port of an origin; None if it cannot be read."""
    try:
        return urlsplit(origin.lower()).netloc
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
