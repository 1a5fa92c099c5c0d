"""Posts a message to a webhook."""

import http.client
import time
import urllib.error
import urllib.request
from typing import Any, Optional
from urllib.parse import urlsplit

TIMEOUT_S = 5.0


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: urllib would send the request, without its body, to any address."""

    def redirect_request(self, *_: Any) -> None:
        return None


def post(url: str, body: bytes, tries: int) -> str:
    """Send the body and return why it was not delivered; empty if it was."""
    host = host_of(url)
    if not host:
        return "it has no address that begins with http:// or https://"
    send = urllib.request.build_opener(_Redirects).open
    why = ""
    for left in reversed(range(tries)):
        try:
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            send(request, timeout=TIMEOUT_S).close()
        except urllib.error.HTTPError as error:
            error.close()
            why = f"{host} answers {error.code}"
            if 300 <= error.code < 400:
                return f"{why}, a redirect, which is not followed; set the address it redirects to"
            if error.code < 500 and error.code != 429:
                return why
        except OSError:
            why = f"{host} gives no answer"
        except (ValueError, http.client.HTTPException):
            return f"{host} gives no answer of HTTP, or the address is malformed"
        else:
            return ""
        if left:
            time.sleep(1)
    return why


def host_of(url: str) -> str:
    """Return the host of an address, safe to print: the path is often a secret.

    >>> host_of("https://user:word@hooks.example.org/s3cret"), host_of("s3cret")
    ('hooks.example.org', '')
    """
    try:
        parts = urlsplit(url)
        host: Optional[str] = parts.hostname
    except ValueError:
        return ""
    known = parts.scheme in ("http", "https") and host is not None and host.isprintable()
    return str(host) if known else ""
