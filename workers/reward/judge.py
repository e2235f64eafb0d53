"""`reward.function=judge`: another model reads the response, by a rubric, and says how good it is.

    reward:
      function: judge
      options: {url: "http://127.0.0.1:8000/v1", model: judge-7b, rubric: "Is the answer right, and is it polite?"}
      timeout_s: 60

Any server that speaks OpenAI's protocol will do. Without a url a frozen model of the run is asked (`judging.py`).
Responses that a reward process has at once are asked about concurrently; an answered question is not asked again. The
response is marked as such in the judge's prompt, and the judge answers with one number; a response can still try to
persuade it.
"""

import asyncio
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.workers.reward.registry import reward
from penstock.workers.reward.rubric import Rubric, Verdicts

KEY = "OPENAI_API_KEY"
MAX_REQUESTS = 16
"""Number of requests of a reward process at once."""


@dataclass
class _Judge:
    """The client of one event loop and one server."""

    client: Any
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_REQUESTS))


_judges: dict[tuple[asyncio.AbstractEventLoop, str, str], _Judge] = {}
VERDICTS = Verdicts()


def _warm(_options: Mapping[str, Any]) -> None:
    importlib.import_module("openai")


@reward("judge", warm=_warm)
async def judge(
    response: str,
    task: dict[str, Any],
    url: str = "",
    model: str = "",
    rubric: str = Rubric.text,
    low: float = Rubric.low,
    high: float = Rubric.high,
    key: str = KEY,
    temperature: float = 0.0,
    max_tokens: int = 256,
    structured: bool = True,
) -> float:
    """The score of a judge, from 0 (`low`) to 1 (`high`).

    `url`: of the server, such as http://host:8000/v1. `rubric`: the judge's criteria; {prompt} and {answer} become the
    row's. `key`: the server's key, or the environment variable of this node that holds it. `structured`: ask for JSON
    by a schema, which most servers can. Raises `ValueError` for an answer that is not one number in the range, and
    what the client raises; the sample is then dropped, without a guessed verdict.
    """
    if not url or not model:
        raise ValueError("reward.options: judge needs url and model")
    by = Rubric(rubric, low, high)
    messages = by.messages(response, task)
    asked = [url, model, temperature, messages]
    known = VERDICTS[asked]
    if known is None:
        form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": by.schema, "strict": True}}
        options: dict[str, Any] = {"response_format": form} if structured else {}
        one = _of_this_loop(url, key)
        async with one.places:
            said = await one.client.chat.completions.create(
                model=model, messages=messages, temperature=temperature, max_tokens=max_tokens, **options
            )
        known = VERDICTS[asked] = by.score(said.choices[0].message.content or "")
    return known


def _of_this_loop(url: str, key: str) -> _Judge:
    for place in [place for place in _judges if place[0].is_closed()]:
        del _judges[place]
    place = asyncio.get_running_loop(), url, key
    if place not in _judges:
        openai = importlib.import_module("openai")
        value = os.environ.get(key) or ("none" if key == KEY else key)
        _judges[place] = _Judge(openai.AsyncOpenAI(base_url=url, api_key=value))
    return _judges[place]
