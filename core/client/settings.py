"""Where the schedulers are and who is asking: options, then the environment, then the state directory of a local cluster."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from gangline.core.client.api import Client, NotConfigured

DEFAULT_STATE_DIR = ".gangline"
#: a token is shorter
MAX_TOKEN_BYTES = 16_384


class Settings:
    """What the options before the command say; "" leaves it to the environment."""

    def __init__(self, url: str = "", token_file: str = "", environ: Mapping[str, str] = os.environ) -> None:
        self.url = url
        self.token_file = token_file
        self._environ = environ

    def client(self, on_wait: Callable[[str], None] | None = None) -> Client:
        """Return a client for the schedulers that these settings name. Raises NotConfigured."""
        urls, token_file = self._addresses()
        token_file = self.token_file or self._environ.get("GANGLINE_TOKEN_FILE", "") or token_file
        return Client(urls, _read_token(token_file) if token_file else "", self.user(), on_wait)

    def user(self) -> str:
        """Return the name under which jobs are submitted."""
        named = self._environ.get("GANGLINE_USER") or self._environ.get("USER")
        if named:
            return named
        import pwd

        try:
            return pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            return str(os.getuid())

    def state_dir(self) -> str:
        """Return the state directory of the local cluster."""
        return self._environ.get("GANGLINE_STATE") or DEFAULT_STATE_DIR

    def _addresses(self) -> tuple[list[str], str]:
        named = self.url or self._environ.get("GANGLINE_URL", "")
        if named:
            return [url.strip() for url in named.split(",") if url.strip()], ""
        path = os.path.join(self.state_dir(), "cluster.json")
        cluster = _read_cluster(path)
        if cluster is None:
            raise NotConfigured(
                f"no scheduler is named: set GANGLINE_URL (or --url) to its address, or start a local cluster by `gangline up` "
                f"(there is no {path})"
            )
        token_file = cluster.get("token_file") or ""
        return [str(url) for url in cluster.get("schedulers", [])], os.path.join(self.state_dir(), token_file) if token_file else ""


def _read_cluster(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            cluster = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise NotConfigured(f"{path} cannot be read: {error}") from None
    if not isinstance(cluster, dict):
        raise NotConfigured(f"{path} is not the description of a cluster")
    return cluster


def _read_token(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            token = file.read(MAX_TOKEN_BYTES).strip()
    except (OSError, UnicodeError) as error:
        raise NotConfigured(f"the token file {path} cannot be read: {error}") from None
    if not token or not token.isprintable() or " " in token:
        raise NotConfigured(f"the token file {path} does not hold a token: one line without spaces")
    return token
