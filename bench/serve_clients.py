"""The clients of `bench.serve load`: `python -m bench.serve_clients URL`, a process of their own.

A line of standard input is a list of bodies, all streamed at the same time; a line of standard
output says when the first set out and when all had ended. Bare sockets and no torch: what a client
makes of its answer is not the server's.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from nemotriton.errors import NemotritonError

PATH = "/v1/completions"


class StreamError(NemotritonError):
    """A stream that did not come to its end."""


async def stream_one(url: str, body: dict[str, Any]) -> int:
    """Events of one answer."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    content = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: {where.netloc}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    count, tail = 0, b""
    while found := await reader.read(1 << 16):
        count += found.count(b"data: ")
        tail = (tail + found)[-64:]
    writer.close()
    if b"data: [DONE]" not in tail:
        raise StreamError(f"a stream ended with {tail!r}: see the server's log.")
    return count


async def stream_all(url: str, bodies: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """When the first client set out and when every stream had ended, of `perf_counter`."""
    start = time.perf_counter()
    await asyncio.gather(*(stream_one(url, body) for body in bodies))
    return start, time.perf_counter()


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(asyncio.run(stream_all(sys.argv[1], json.loads(line)))), flush=True)
