"""An ordinary agent: a loop around the `openai` client, and a tool. It knows of no training."""

import json

from openai import AsyncOpenAI

TOOLS = [{"type": "function", "function": {
    "name": "add", "description": "The sum of two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}}]  # fmt: skip


async def solve(question: str, base_url: str, api_key: str) -> str:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": question}]
        while True:
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            message = answer.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message)
            for call in message.tool_calls:
                numbers = json.loads(call.function.arguments)
                said = str(numbers["a"] + numbers["b"]) if {"a", "b"} <= numbers.keys() else "a and b, please"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
