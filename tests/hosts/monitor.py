"""A monitoring host: requests one page over TLS, and prints its status and its first bytes as JSON."""

from __future__ import annotations

import json
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

_WAIT_S = 10.0


def main() -> None:
    """Request the page that was named, with the token of a file if one was given."""
    url, authorities, *token_file = sys.argv[1:]
    headers = {"Authorization": f"Bearer {Path(token_file[0]).read_text().strip()}"} if token_file else {}
    request = urllib.request.Request(url, headers=headers)
    context = ssl.create_default_context(cafile=authorities)
    try:
        with urllib.request.urlopen(request, timeout=_WAIT_S, context=context) as answer:
            told = [answer.status, answer.read(2048).decode()]
    except urllib.error.HTTPError as refusal:
        told = [refusal.code, refusal.read(2048).decode()]
    except OSError as error:
        told = [0, str(error)]
    print(json.dumps(told), flush=True)  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main()
