"""An MCP server by hand, which does what servers should not, and starts within milliseconds."""

import json
import os
import subprocess
import sys
import time
from typing import Any

kept: list[str] = []


def called(name: str, arguments: dict[str, str]) -> str:
    if name == "die":
        print("out of memory", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "hang":
        time.sleep(120)
    if name == "flood":
        print("x" * 2**25, flush=True)
    if name == "child":
        return f"{os.getpid()} {subprocess.Popen(['sleep', '300']).pid}"
    kept.append(arguments["note"])
    return ",".join(kept)


def result(method: str, asked: dict[str, Any]) -> dict[str, Any] | None:
    if method == "initialize":
        version = asked["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "r", "version": "0"}}
    if method == "tools/list":
        names = ("keep", "die", "hang", "flood", "child")
        return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in names]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": called(asked["name"], asked["arguments"])}]}
    return None


if __name__ == "__main__":
    print("Starting.", flush=True)  # to where it should not
    if "silent" in sys.argv:
        time.sleep(120)
    if "broken" in sys.argv:
        sys.exit("no such database")
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        found = result(message["method"], message.get("params") or {})
        answer = {"result": found} if found is not None else {"error": {"code": -32601, "message": "no such method"}}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}), flush=True)
