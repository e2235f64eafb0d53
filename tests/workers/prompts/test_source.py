"""Rows become groups: tokens, lengths, cursors. The source puts them into a real store."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.algorithms import GrpoConfig
from penstock.conf.data import ColumnsConfig, DataConfig, EvaluationConfig
from penstock.conf.errors import DataError, ModelError
from penstock.conf.model import FreshModelConfig
from penstock.conf.rollout import RolloutConfig, SamplingConfig
from penstock.conf.run import RunConfig
from penstock.conf.trainer import TrainerConfig
from penstock.store.client.store_client import StoreClient
from penstock.store.errors import StoreClosed
from penstock.store.service.store import Store
from penstock.store.spec import StoreSpec
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.prompts.dataset import open_dataset
from penstock.workers.prompts.dataset_row import DatasetRow
from penstock.workers.prompts.opening import check_prompts, encoder_of, open_source
from penstock.workers.prompts.order import PromptCursor
from penstock.workers.prompts.source import PromptSource, PromptStart
from penstock.workers.prompts.tokenization import PromptEncoder, PromptTooLong, TokenLimits

BOS, EOS = 1, 2


class Characters:
    """A tokenizer: one token a character, its code; a BOS before bare text."""

    eos_token_id: int | None = EOS

    def __init__(self, chat_template=None):
        self.chat_template = chat_template

    def __call__(self, text, add_special_tokens=True):
        ids = [ord(character) for character in text]
        return {"input_ids": [BOS, *ids] if add_special_tokens and text else ids}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def text_of(ids):
    return "".join(chr(token) for token in ids if token not in (BOS, EOS))


def make_config(path, **data):
    return RunConfig(
        algorithm=GrpoConfig(group_size=2),
        data=DataConfig(path=str(path), **{"max_prompt_tokens": 50, **data}),
        rollout=RolloutConfig(max_model_len=80, sampling=SamplingConfig(max_tokens=20)),
        trainer=TrainerConfig(groups_per_step=3),
    )


def make_source(path, *, tokenizer=None, rows_are="prompts", cursor=None, first_group=0, once=False, **data):
    config = make_config(path, **data)
    dataset = open_dataset(config.data, EvaluationConfig())
    limits = TokenLimits.of_run(config, with_responses=rows_are != "prompts")
    encoder = PromptEncoder(tokenizer or Characters(), config.data, limits)
    return PromptSource(
        dataset, encoder, PromptStart(cursor or PromptCursor(), first_group), rows_are=rows_are, once=once
    )


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}+{n}", "answer": str(2 * n)}) + "\n" for n in range(7)))
    return path


def test_a_group_has_prompt_ids_and_the_task_as_json(rows):
    (group,) = make_source(rows, shuffle=False).next_groups(1)
    assert group["prompt_ids"] == [BOS, *map(ord, "0+0")]
    assert json.loads(group["task"])["answer"] == "0"
    assert "response_ids" not in group


def test_the_chat_template_is_applied_with_the_system_prompt_and_no_second_bos(rows):
    (group,) = make_source(rows, tokenizer=Characters("a template"), shuffle=False, system_prompt="Add.").next_groups(1)
    assert group["prompt_ids"][0] != BOS
    assert text_of(group["prompt_ids"]) == "<system>Add.<user>0+0<assistant>"


def test_without_a_chat_template_the_text_is_bare(rows):
    for options in ({"tokenizer": Characters("a template"), "chat_template": False}, {"tokenizer": Characters()}):
        (group,) = make_source(rows, shuffle=False, **options).next_groups(1)
        assert text_of(group["prompt_ids"]) == "0+0"


def test_demonstrations_end_with_the_end_of_sequence_token(rows):
    (group,) = make_source(rows, rows_are="demonstrations", shuffle=False).next_groups(1)
    assert group["response_ids"] == [ord("0"), EOS]
    assert group["response_text"] == "0"


def test_demonstrations_need_an_end_of_sequence_token(rows):
    tokenizer = Characters()
    tokenizer.eos_token_id = None
    with pytest.raises(ModelError, match="eos_token"):
        make_source(rows, tokenizer=tokenizer, rows_are="demonstrations").next_groups(1)


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    row = {"question": "1+1", "good": "2", "bad": "eleven"}
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"bad": ""}) + "\n")
    return path


def test_preferences_have_a_chosen_and_a_rejected_response(pairs):
    columns = ColumnsConfig(response="good", rejected="bad", answer=None)
    source = make_source(pairs, rows_are="preferences", shuffle=False, columns=columns)
    (group,) = source.next_groups(1)
    assert group["chosen_ids"] == [ord("2"), EOS]
    assert group["rejected_ids"] == [*map(ord, "eleven"), EOS]
    assert "response_ids" not in group
    assert not {"good", "bad"} & json.loads(group["task"]).keys()
    with pytest.raises(DataError, match=r"line 2: no rejected response to compare.*data\.columns\.rejected"):
        source.next_groups(1)


def write_long(path, length, count=1):
    lines = [{"question": "1+1", "answer": "2"}] * 3 + [{"question": "x" * length, "answer": "y" * length}] * count
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_prompt_too_long_is_named_with_its_row_its_length_and_both_limits(tmp_path):
    source = make_source(write_long(tmp_path / "a.jsonl", 55), shuffle=False)
    with pytest.raises(
        PromptTooLong, match=r"a\.jsonl line 4: .*56 tokens.*data\.max_prompt_tokens=50.*room for 60.*max_model_len"
    ):
        source.next_groups(4)


def test_a_prompt_that_leaves_no_room_for_a_response_is_refused(tmp_path):
    source = make_source(write_long(tmp_path / "a.jsonl", 70), shuffle=False, max_prompt_tokens=500)
    with pytest.raises(
        PromptTooLong, match=r"71 tokens.*room for 60.*rollout\.sampling\.max_tokens.*raise rollout\.max_model_len"
    ):
        source.next_groups(4)


def test_a_demonstration_must_fit_with_its_prompt(tmp_path):
    source = make_source(write_long(tmp_path / "a.jsonl", 45), shuffle=False, rows_are="demonstrations")
    with pytest.raises(PromptTooLong, match=r"46 tokens and its response 46.*room for 80"):
        source.next_groups(4)


def test_long_prompts_are_skipped_and_counted_if_asked(tmp_path):
    source = make_source(write_long(tmp_path / "a.jsonl", 55), too_long="skip")
    groups = source.next_groups(9)
    assert {text_of(group["prompt_ids"]) for group in groups} == {"1+1"}
    assert source.stats()["dropped/prompt_too_long"] == source.num_left_out["prompt_too_long"] >= 2


def test_skipping_everything_is_an_error_and_no_endless_loop(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": "x" * 55, "answer": "y"}) + "\n")
    with pytest.raises(DataError, match="left out every one of the 1 rows"):
        make_source(path, too_long="skip").next_groups(1)


def test_an_empty_prompt_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "", "answer": "1"}\n')
    with pytest.raises(DataError, match="line 1: the prompt '' has no tokens"):
        make_source(path).next_groups(1)


def test_the_order_goes_on_over_epochs_and_resumes_after_any_group(rows):
    whole = make_source(rows).next_groups(30)
    source = make_source(rows)
    source.next_groups(30)
    for taken in (0, 1, 7, 12):
        resumed = make_source(rows, cursor=source.cursor_after(taken), first_group=taken)
        assert resumed.next_groups(30 - taken) == whole[taken:]
        assert resumed.cursor_after(30) == source.cursor_after(30) == PromptCursor(4, 2)
    with pytest.raises(DataError, match="after 31 groups is unknown"):
        source.cursor_after(31)


def test_cursors_count_skipped_rows(tmp_path):
    path = write_long(tmp_path / "a.jsonl", 55, count=4)
    whole = make_source(path, too_long="skip").next_groups(10)
    source = make_source(path, too_long="skip")
    source.next_groups(10)
    resumed = make_source(path, too_long="skip", cursor=source.cursor_after(4), first_group=4)
    assert resumed.next_groups(6) == whole[4:]


def test_held_out_rows_come_once_in_order(rows):
    source = make_source(rows, once=True)
    groups = source.next_groups(100)
    assert [text_of(group["prompt_ids"]) for group in groups] == [f"{n}+{n}" for n in range(7)]
    assert len(source) == 7
    assert source.next_groups(1) == []


def loss(logprobs, mask, totals):
    raise NotImplementedError


def test_run_keeps_the_store_supplied_as_credits_allow_until_it_closes(rows):
    async def run():
        flow = Dataflow().rollout(samples_per_prompt=2).train(loss=loss).check()
        store = Store(StoreSpec.of(flow, make_config(rows), strict=True))
        client, source = StoreClient(store), make_source(rows)
        running = asyncio.create_task(source.run(StoreClient(store), batch=2))
        lease = await client.lease("rollout", 100, "rollout-0")
        await asyncio.sleep(0.05)
        more = await client.lease("rollout", 100, "rollout-0") if len(lease.rows) < 6 else None
        admitted = len(lease.rows) + (len(more.rows) if more else 0)
        drawn = source.stats()["groups"]
        await asyncio.sleep(0.05)
        still = source.stats()["groups"]
        await client.close("done")
        await asyncio.wait_for(running, 2)
        return admitted, drawn, still

    admitted, drawn, still = asyncio.run(run())
    assert admitted == 3 * 2  # max_staleness=0: the groups of one step, each with its samples
    assert drawn == still <= 3 + 2  # at most one batch waits at the door


def checked(config, rows_are="prompts", **options):
    encoder = encoder_of(config, Characters(), None, rows_are)
    return check_prompts(open_dataset(config.data, EvaluationConfig()), encoder, config, rows_are=rows_are, **options)


def test_check_counts_and_finds_the_longest_prompt(tmp_path):
    path = write_long(tmp_path / "a.jsonl", 35)
    config = make_config(path)
    report = checked(config, sample=2)
    assert (report.rows, report.read, report.tokenized, report.longest_prompt) == (4, 4, 2, 36)
    report = checked(config, rows_are="demonstrations")
    assert report.longest_response == 36


def test_check_finds_a_long_prompt_and_a_bad_line_wherever_they_are(tmp_path):
    path = write_long(tmp_path / "a.jsonl", 55)
    config = make_config(path)
    with pytest.raises(PromptTooLong, match="line 4"):
        checked(config, sample=1)
    skipping = make_config(path, too_long="skip")
    assert checked(skipping).skipped == 1
    with path.open("a") as file:
        file.write("{\n")
    with pytest.raises(DataError, match="line 5: not valid JSON"):
        checked(skipping, sample=1)


def test_check_makes_few_of_an_environments_problems_and_each_once(tmp_path):
    (tmp_path / "teacher.py").write_text(
        "told = []\ndef teach(task):\n    told.append(task['index'])\n    return str(len(told))\n"
    )
    config = make_config(
        "chain_sum", source="reasoning_gym", size=40, teacher=f"{tmp_path}/teacher.py:teach",
        options={"max_terms": 2, "max_digits": 1}, max_prompt_tokens=75,
    )  # fmt: skip
    report = checked(config, rows_are="demonstrations", sample=5)
    assert (report.rows, report.read, report.tokenized) == (40, 5, 5)
    assert report.longest_response == len("5") + 1


def test_a_row_without_a_demonstration_is_named():
    encoder = PromptEncoder(Characters(), DataConfig(), TokenLimits(50, 60, ""))
    with pytest.raises(DataError, match=r"row 3: no demonstration.*data\.columns\.response"):
        encoder.demonstration(SimpleNamespace(prompt="q", response=None, where="row 3"))


def test_the_tokenizer_of_a_model_directory_is_used(rows, tmp_path):
    build_fresh_model(tmp_path / "model", FreshModelConfig(num_layers=1, hidden_size=32, intermediate_size=32), seed=0)
    source = open_source(make_config(rows, shuffle=False), str(tmp_path / "model"), rows_are="demonstrations")
    (group,) = source.next_groups(1)
    tokenizer = source.encoder.tokenizer
    assert tokenizer.decode(group["prompt_ids"]) == "0+0\n"
    assert tokenizer.decode(group["response_ids"]) == "0<eos>"


def test_a_model_directory_without_a_tokenizer_is_named(rows, tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelError, match=r"model\.path=.*tokenizer cannot be loaded"):
        open_source(make_config(rows), str(tmp_path / "model"))


def test_a_held_out_source_needs_held_out_rows(rows):
    with pytest.raises(DataError, match=r"evaluation\.path=null"):
        open_source(make_config(rows), "unused", held_out=True)


def test_a_resumed_source_goes_on_after_the_groups_that_the_store_has(rows):
    source = make_source(rows)
    source.next_groups(8)
    start = source.start_after(5)
    assert (start.cursor, start.first_group, start.data) == (source.cursor_after(5), 5, source.identity)
    resumed = make_source(rows, cursor=start.cursor, first_group=start.first_group)
    assert asyncio.run(_put_by(resumed, 3)) == make_source(rows).next_groups(8)[5:]


async def _put_by(source, count):
    """What the source puts before the store closes after `count` groups."""
    taken = []

    class Sink:
        async def become_source(self):
            return source.stats()["groups"]

        async def put_groups(self, groups):
            taken.extend(groups)
            raise StoreClosed("enough")

    await source.run(Sink(), batch=count)
    return taken


def test_a_teacher_gets_the_rows_hint_and_the_policy_does_not(rows):
    config = make_config(rows)
    limits = TokenLimits.of_run(config, with_responses=False)
    encoder = PromptEncoder(Characters(), config.data, limits, hint="{prompt} is {answer} ({question})")
    dataset = open_dataset(config.data, EvaluationConfig())
    (group,) = PromptSource(dataset, encoder).next_groups(1)
    assert text_of(group["hinted_ids"]) == "{0} is {1} ({0})".format(
        text_of(group["prompt_ids"]), json.loads(group["task"])["answer"]
    )
    with pytest.raises(DataError, match=r"algorithm\.hint names {anwser}.*answer"):
        PromptEncoder(Characters(), config.data, limits, hint="{anwser}").hinted(dataset.row(0))


def test_the_hint_takes_the_place_of_a_conversations_last_text():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    row = DatasetRow("1+1", "2", 0, "row 0", messages=messages)
    hinted = row.with_hint("{prompt}={answer}")
    assert list(hinted.messages) == [messages[0], {"role": "user", "content": "1+1=2"}]
    assert hinted.prompt == "1+1=2"
    assert row.messages is messages
