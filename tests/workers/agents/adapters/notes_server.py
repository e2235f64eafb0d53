"""A small server of the `mcp` package."""

import os
import sys

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def keep(note: str) -> str:
    """Keep a note; what is kept, in order."""
    notes.append(note)
    return ",".join(notes)


@server.tool()
def divide(a: int, b: int) -> float:
    """A quotient."""
    return a / b


@server.tool()
def picture() -> Image:
    """Bytes."""
    return Image(data=b"\x89PNG" * 8, format="png")


@server.tool()
def secret(name: str) -> str:
    """An environment variable."""
    return os.environ.get(name, "nothing")


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
