"""Rows of chat messages: as TRL's and verl's datasets have them."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.conf.data import ColumnsConfig, DataConfig, EvaluationConfig
from penstock.conf.errors import ConfigError, DataError
from penstock.conf.model import ModelConfig
from penstock.workers.agents import environment as environments
from penstock.workers.agents.adapters.agent import row_of
from penstock.workers.prompts.dataset import open_dataset
from penstock.workers.prompts.dataset_row import DatasetRow, is_conversation, messages_of, with_template
from penstock.workers.prompts.source import PromptSource
from penstock.workers.prompts.tokenization import PromptEncoder, TokenLimits
from tests.workers.agents.gateway.formats.real_templates import trl_tokenizer

ASKED = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 2?"}]
ANSWERED = {"role": "assistant", "content": "4"}


def opened(tmp_path: Path, row: dict[str, Any], **settings: Any) -> DatasetRow:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    columns = ColumnsConfig(
        **{key: settings.pop(key) for key in list(settings) if key in ColumnsConfig.__annotations__}
    )
    dataset = open_dataset(DataConfig(path=f"{tmp_path}/rows.jsonl", columns=columns, **settings), EvaluationConfig())
    assert dataset is not None
    return dataset.row(0)


class Tokenizer:
    """Writes messages so that they can be read in a test."""

    chat_template: str | None = "one"

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        assert add_generation_prompt
        return "|".join(f"{message['role']}: {message['content']}" for message in messages) + "|assistant:"


def text_of(task: DatasetRow, tokenizer: Tokenizer | None = None, **settings: Any) -> str:
    return PromptEncoder(tokenizer or Tokenizer(), DataConfig(**settings), TokenLimits(10, 10, "room")).text(task)


def test_a_prompt_of_messages_is_the_conversation_that_is_continued(tmp_path: Path) -> None:
    """TRL's `prompt` column of GRPO, with a reference answer beside it."""
    task = opened(tmp_path, {"prompt": ASKED, "solution": "4"}, prompt="prompt", answer="solution")
    assert (task.messages, task.prompt, task.answer, task.response) == (ASKED, "2 + 2?", "4", "4")
    assert text_of(task) == "system: Be short.|user: 2 + 2?|assistant:"
    assert json.loads(task.to_json())["prompt"] == "2 + 2?"


def test_messages_that_end_with_the_assistants_are_a_demonstration(tmp_path: Path) -> None:
    """TRL's `messages` column of SFT."""
    task = opened(tmp_path, {"messages": [*ASKED, ANSWERED]}, prompt="messages", answer=None)
    assert (task.messages, task.response) == (ASKED, "4")


def test_pairs_may_be_messages_too(tmp_path: Path) -> None:
    """TRL's columns of DPO."""
    row = {"prompt": ASKED, "chosen": [ANSWERED], "rejected": [{"role": "assistant", "content": "5"}]}
    task = opened(tmp_path, row, prompt="prompt", answer=None, response="chosen", rejected="rejected")
    assert (task.messages, task.response, task.rejected) == (ASKED, "4", "5")


def test_the_reference_may_be_a_field_of_a_column(tmp_path: Path) -> None:
    """verl's rows."""
    row = {"data_source": "sums", "prompt": ASKED, "reward_model": {"style": "rule", "ground_truth": "4"}}
    task = opened(tmp_path, row, prompt="prompt", answer="reward_model.ground_truth")
    assert (task.prompt, task.answer, task.extra["data_source"]) == ("2 + 2?", "4", "sums")
    with pytest.raises(DataError, match=r"no column 'truth', which data.columns.answer names"):
        opened(tmp_path, row, prompt="prompt", answer="reward_model.truth")


def test_the_template_is_put_around_the_users_last_text(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "one"}, *ASKED[1:]]
    task = opened(tmp_path, {"prompt": messages}, prompt="prompt", answer=None, prompt_template="{prompt} Think.")
    assert [message["content"] for message in task.messages] == ["1?", "one", "2 + 2? Think."]
    assert task.prompt == "2 + 2? Think."
    assert messages == [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "one"}, *ASKED[1:]]
    assert with_template([{"role": "tool", "content": "x"}], "{prompt}!") == [{"role": "tool", "content": "x"}]


def test_a_system_prompt_is_for_conversations_without_one(tmp_path: Path) -> None:
    task = opened(tmp_path, {"prompt": ASKED}, prompt="prompt", answer=None)
    assert text_of(task, system_prompt="Mine.").startswith("system: Be short.|")
    task = opened(tmp_path, {"prompt": ASKED[1:]}, prompt="prompt", answer=None)
    assert text_of(task, system_prompt="Mine.") == "system: Mine.|user: 2 + 2?|assistant:"


def test_the_environment_begins_with_the_whole_conversation(tmp_path: Path) -> None:
    """The conversation is in the task beside the row's own columns, and not in their place."""
    earlier = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "one"}]
    row = {"prompt": [*earlier, *ASKED[1:]], "messages": "the row's own", "answer": "4"}
    found = played(tmp_path, row, system_prompt="Mine.", prompt_template="{prompt} Think.")
    question = {"role": "user", "content": "2 + 2? Think."}
    assert found.messages == [{"role": "system", "content": "Mine."}, *earlier, question]
    assert (found.data["prompt"], found.data["messages"]) == ("2 + 2? Think.", "the row's own")
    assert played(tmp_path, {"prompt": ASKED, "answer": "4"}, system_prompt="Mine.").messages == ASKED
    text = played(tmp_path, {"prompt": "2 + 2?", "answer": "4"}, system_prompt="Mine.")
    assert text.messages == [{"role": "system", "content": "Mine."}, *ASKED[1:]]
    assert row_of(text)["messages"] == text.messages  # what an agent is told


def played(tmp_path: Path, row: dict[str, Any], **settings: Any) -> environments.Task:
    """The row as an environment gets it."""
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(row))
    data = DataConfig(path=str(path), columns=ColumnsConfig("prompt"), **settings)
    dataset = open_dataset(data, EvaluationConfig())
    assert dataset is not None
    encoder = PromptEncoder(Tokenizer(), data, TokenLimits(10, 10, "room"))
    (group,) = PromptSource(dataset, encoder, rows_are="tasks").next_groups(1)
    return environments.Task.from_json(group["task"])


def test_the_template_is_told_what_the_configuration_says(tmp_path: Path) -> None:
    class Told(Tokenizer):
        def apply_chat_template(self, messages: list[dict[str, str]], **told: Any) -> str:
            return f"{told['enable_thinking']}"

    task = opened(tmp_path, {"prompt": ASKED}, prompt="prompt", answer=None)
    encoder = PromptEncoder(Told(), DataConfig(), TokenLimits(10, 10, "room"), {"enable_thinking": False})
    assert encoder.text(task) == "False"
    with pytest.raises(ConfigError, match=r"model\.chat_template_kwargs\.tools: the template is told this of each"):
        ModelConfig(chat_template_kwargs={"tools": []})


def test_a_conversation_needs_a_chat_template(tmp_path: Path) -> None:
    task = opened(tmp_path, {"prompt": ASKED}, prompt="prompt", answer=None)
    bare = Tokenizer()
    bare.chat_template = None
    for tokenizer, settings in ((bare, {}), (Tokenizer(), {"chat_template": False})):
        with pytest.raises(DataError, match="there is no chat template to write it with"):
            text_of(task, tokenizer, **settings)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "holds no message"),
        ([{"role": "human", "content": "2"}], "message 1 is of role 'human'. Known: system, user"),
        ([*ASKED, {"role": "user", "content": ["an", "image"]}], "the content of message 3 is list, where text is due"),
    ],
)
def test_what_is_out_of_order_is_told_by_its_number(messages: list[Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        messages_of(messages, "rows.jsonl:7")


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}, "tool_calls"),
        ({"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}, "tool_calls"),
        ({"role": "assistant", "content": "", "function_call": {"name": "add"}}, "function_call"),
        ({"role": "tool", "content": "4", "tool_call_id": "1"}, "tool_call_id"),
        ({"role": "tool", "content": "4", "name": "add"}, "name"),
    ],
)
def test_calls_of_tools_are_refused_by_name_and_not_left_out(message: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=f"rows.jsonl:7: message 3 has {told}, which is not supported"):
        messages_of([*ASKED, message], "rows.jsonl:7")
    empty: dict[str, Any] = {"role": message["role"], "content": "4", told: type(message[told])()}
    assert messages_of([empty, {**empty, told: None}], "") == [{"role": message["role"], "content": "4"}] * 2


def test_a_users_name_is_left_out() -> None:
    assert messages_of([{**ASKED[1], "name": "Ann"}], "") == ASKED[1:]


def test_a_response_to_nothing_and_a_response_of_the_user_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="begins with a response to nothing"):
        opened(tmp_path, {"prompt": [ANSWERED]}, prompt="prompt", answer=None)
    with pytest.raises(DataError, match=r"'chosen' .*: its last message is of role 'user'"):
        opened(tmp_path, {"prompt": ASKED, "chosen": ASKED}, prompt="prompt", answer=None, response="chosen")


def test_other_lists_are_no_conversation() -> None:
    assert not any(is_conversation(value) for value in ("text", {"role": "user"}, [1], ["a"], [{"role": "user"}]))
    assert is_conversation(ASKED)


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "gemma3", "phi3"])
def test_a_prompt_that_ends_with_the_assistants_words_is_continued(tmp_path: Path, name: str) -> None:
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "The answer is"}]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": messages, "messages": messages, "answer": "4"}) + "\n")
    tokenizer = trl_tokenizer(name)
    texts = {}
    for column in ("prompt", "messages"):
        data = DataConfig(path=str(file), columns=ColumnsConfig(prompt=column))
        dataset = open_dataset(data, EvaluationConfig())
        assert dataset is not None
        row = dataset.row(0)
        encoder = PromptEncoder(tokenizer, data, TokenLimits(1000, 1000, "enough"))
        texts[column] = tokenizer.decode(encoder.prompt(row).ids)
        demonstrated, response = encoder.demonstration(row)
        assert tokenizer.decode([*demonstrated.ids, *response]).startswith(texts["prompt"])
    assert texts["prompt"] == f"{texts['messages']}The answer is", "of `messages` it is the demonstration"
