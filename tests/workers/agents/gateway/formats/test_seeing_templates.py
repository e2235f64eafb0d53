"""Chat templates as models that see ship them: each picture has one placeholder, at whichever turn it comes."""

from typing import Any

import pytest

from penstock.conf.model import FreshModelConfig
from penstock.workers.agents.gateway.chat_formats import TemplateFormat
from penstock.workers.agents.gateway.conversation import kept
from penstock.workers.agents.trajectory import Turn
from penstock.workers.fresh_model import character_tokenizer
from tests.vision_models import picture
from tests.workers.agents.gateway.formats.real_templates import QWEN_MARKS, hermes_call, trl_template

ENDS = {
    "qwen2_5_vl": "<|im_end|>", "qwen3_vl": "<|im_end|>", "llava_next": "</s>", "idefics3": "<end_of_utterance>",
    "smolvlm": "<end_of_utterance>",
}  # fmt: skip
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<image>", "</s>", "<end_of_utterance>")
ONE = picture(28, 28)
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class Written:
    """The format of one template, over a character tokenizer that has the marks as tokens."""

    def __init__(self, name: str) -> None:
        self.end = ENDS[name]
        self.tokenizer = character_tokenizer(FreshModelConfig(words=[*QWEN_MARKS, *VISION]))
        self.tokenizer.chat_template, self.tokenizer.eos_token = trl_template(name), self.end
        self.form = TemplateFormat(self.tokenizer, in_parts=True)
        self.placeholder = "<|image_pad|>" if "qwen" in name else "<image>"

    def turn(self, text: str, messages: list[Any], tools: Any = ()) -> Turn:
        ids = self.tokenizer(text + self.end, add_special_tokens=False)["input_ids"]
        read, prompt = self.form.read(ids, tools), self.form.prompt_ids(messages, tools)
        return Turn(0, None, read.message, read.calls, prompt, ids, [-1.0] * len(ids), [0] * len(ids), "stop")

    def text(self, token_ids: Any) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))


@pytest.mark.parametrize("name", ENDS)
def test_a_turn_goes_on_with_one_placeholder_for_each_new_picture(name: str) -> None:
    written = Written(name)
    asked = kept([{"role": "user", "content": [ONE, "What?"]}])
    new = kept([{"role": "user", "content": ["And", ONE, ONE]}])
    turn = written.turn("one", asked)
    assert written.text(turn.prompt_ids).count(written.placeholder) == 1
    following = written.form.next_prompt_ids(turn, asked, new, ())
    assert following is not None
    read = len(turn.prompt_ids) + len(turn.output_ids)
    assert following[:read] == [*turn.prompt_ids, *turn.output_ids]
    assert written.text(following[read:]).count(written.placeholder) == 2
    whole = written.text(written.form.prompt_ids([*asked, turn.message, *new], ()))
    assert written.text(following).partition("one")[2] == whole.partition("one")[2]


def test_what_a_tool_shows_goes_on_and_a_call_has_no_words_before_it() -> None:
    written = Written("qwen3_vl")
    asked = kept([{"role": "user", "content": "Look."}])
    turn = written.turn(hermes_call("look", "{}"), asked, [LOOK])
    (call,) = turn.calls
    new = kept([{"role": "tool", "tool_call_id": call.id, "name": "look", "content": [ONE, "!"]}])
    following = written.form.next_prompt_ids(turn, asked, new, [LOOK])
    whole = written.form.prompt_ids([*asked, turn.message, *new], [LOOK])
    assert following == whole
    assert f"<|vision_start|>{written.placeholder}<|vision_end|>!" in written.text(whole)
