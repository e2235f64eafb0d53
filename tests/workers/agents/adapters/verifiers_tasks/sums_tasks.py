"""A taskset of `verifiers`, and a harness that asks twice in its own process. Of its three tasks the last one hangs."""

import asyncio
import json
import os
import urllib.request
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Sums", "Twice"]


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        print("what tasksets print is no message")
        for number in range(3):
            yield SumTask(SumData(prompt=f"{number}+2?", answer=str(number + 2)), self.config.task)


class Twice(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        if data.answer == "4":
            await sleep()
        messages = [{"role": "user", "content": data.prompt}]
        for _ in range(2):
            said = await asyncio.to_thread(ask, endpoint, secret, ctx.model, messages)
            messages += [said, {"role": "user", "content": "Sure?"}]
        return ProgramResult(0, "", "")


async def sleep():
    log = Path(os.environ["SUMS_LOG"])
    log.write_text("asleep\n")
    try:
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        log.write_text("asleep\ncancelled\n")
        raise


def ask(endpoint, secret, model, messages):
    request = urllib.request.Request(
        f"{endpoint.rstrip('/')}/chat/completions",
        json.dumps({"model": model, "messages": messages}).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {secret}"},
    )
    with urllib.request.urlopen(request) as answer:
        message = json.loads(answer.read())["choices"][0]["message"]
    return {"role": "assistant", "content": message["content"]}
