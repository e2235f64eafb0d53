"""Agents as people write them: each keeps its history in its protocol's own words, and sends it back as it likes."""

import random
from typing import Any

from tests.workers.agents.gateway.chat_models import ADD
from tests.workers.agents.gateway.http.serving import Gateway

FUNCTION = ADD["function"]


class ChatAgent:
    def __init__(self, gateway: Gateway, rng: random.Random, system: str) -> None:
        self._client, self._rng, self._system = gateway.openai, rng, system
        self.messages: list[Any] = []
        self.open_calls: list[str] = []
        """Ids of calls that the last answer made."""

    def ask(self, text: str) -> None:
        """Results for all calls that are open; and a question, unless those are enough."""
        self.messages += [{"role": "tool", "tool_call_id": call, "content": text} for call in self.open_calls]
        if not self.open_calls or self._rng.random() < 0.3:
            self.messages.append({"role": "user", "content": text})
        self.open_calls = []

    def compact(self, text: str) -> None:
        self.messages, self.open_calls = [{"role": "user", "content": f"So far: {text}"}], []

    async def go_on(self, **more: Any) -> None:
        system = [{"role": self._rng.choice(["system", "developer"]), "content": self._system}]
        asked = {"model": "policy", "messages": [*system, *self.messages], "tools": [ADD], **more}
        if self._rng.random() < 0.5:
            async with self._client.chat.completions.stream(**asked) as stream:
                answer = await stream.get_final_completion()
        else:
            answer = await self._client.chat.completions.create(**asked)
        message = answer.choices[0].message.model_dump(exclude_none=True)
        if self._rng.random() < 0.5:
            message.pop("reasoning_content", None)
        for call in message.get("tool_calls", ()):
            call["function"].pop("parsed_arguments", None)
        self.messages.append(message)
        self.open_calls = [call["id"] for call in message.get("tool_calls", ())]


class ResponsesAgent:
    def __init__(self, gateway: Gateway, rng: random.Random, system: str) -> None:
        self._client, self._rng, self._system = gateway.openai, rng, system
        self.items: list[Any] = []
        self.open_calls: list[str] = []
        self._last: str | None = None

    def ask(self, text: str) -> None:
        self._asked = [{"type": "function_call_output", "call_id": call, "output": text} for call in self.open_calls]
        if not self.open_calls or self._rng.random() < 0.3:
            self._asked.append({"role": "user", "content": [{"type": "input_text", "text": text}]})  # type: ignore[dict-item]
        self.items += self._asked
        self.open_calls = []

    def compact(self, text: str) -> None:
        self.items = self._asked = [{"role": "user", "content": f"So far: {text}"}]
        self._last, self.open_calls = None, []

    async def go_on(self, **more: Any) -> None:
        tools = [{"type": "function", "strict": False, **FUNCTION}]  # type: ignore[dict-item]
        asked = {"model": "policy", "input": self.items, "instructions": self._system, "tools": tools, **more}
        if self._last is not None and self._rng.random() < 0.5:
            asked |= {"input": self._asked, "previous_response_id": self._last}
        if self._rng.random() < 0.5:
            async with self._client.responses.stream(**asked) as stream:
                answer: Any = await stream.get_final_response()
        else:
            answer = await self._client.responses.create(**asked)
        drops = self._rng.random() < 0.5
        self.items += [
            item.model_dump(exclude_none=True, exclude={"parsed_arguments"})
            for item in answer.output
            if not (drops and item.type == "reasoning")
        ]
        self.open_calls = [item.call_id for item in answer.output if item.type == "function_call"]
        self._last = answer.id


class MessagesAgent:
    def __init__(self, gateway: Gateway, rng: random.Random, system: str) -> None:
        self._client, self._rng, self._system = gateway.anthropic, rng, system
        self.messages: list[Any] = []
        self.open_calls: list[str] = []

    def ask(self, text: str) -> None:
        blocks: list[Any] = [{"type": "tool_result", "tool_use_id": call, "content": text} for call in self.open_calls]
        if not self.open_calls or self._rng.random() < 0.3:
            blocks.append({"type": "text", "text": text})
        self.messages.append({"role": "user", "content": blocks})
        self.open_calls = []

    def compact(self, text: str) -> None:
        self.messages, self.open_calls = [{"role": "user", "content": f"So far: {text}"}], []

    async def go_on(self, **more: Any) -> None:
        tool = {
            "name": "add", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"],  # type: ignore[index]
        }  # fmt: skip
        asked = {
            "model": "policy", "max_tokens": 1000, "messages": self.messages, "tools": [tool],
            "system": self._system, **more,
        }  # fmt: skip
        if self._rng.random() < 0.5:
            asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        if self._rng.random() < 0.5:
            async with self._client.messages.stream(**asked) as stream:
                answer: Any = await stream.get_final_message()
        else:
            answer = await self._client.messages.create(**asked)
        self.messages.append({"role": "assistant", "content": answer.content})
        self.open_calls = [block.id for block in answer.content if block.type == "tool_use"]


KINDS = (ChatAgent, ResponsesAgent, MessagesAgent)
