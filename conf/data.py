"""Source of the prompts, and the making of a prompt from a row."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.conf.checks import AUTO, above, at_least, auto_or_number, check_bounds, one_of
from penstock.conf.errors import ConfigError

ENVIRONMENT = "environment"
SOURCES = (AUTO, "jsonl", "huggingface", "reasoning_gym", "python", ENVIRONMENT)


@dataclass
class ColumnsConfig:
    """Names of the dataset's own columns."""

    prompt: str = "question"
    """Column with the user's text, or with chat messages: [{role: user, content: …}, …]. If these end with the
    assistant's, that is the demonstration; where responses are sampled and the column is called prompt, they go on with
    it. Where no column is called question and one prompt, it is that."""
    answer: str | None = "answer"
    """Column with the reference answer, handed to the reward; a.b is the field b of column a. Where no column is called
    answer, it is solution (TRL) or reward_model.ground_truth (verl). `null`: the reward needs none."""
    response: str | None = None
    """Column with a demonstration, for SFT, or with the chosen response of a pair, as text or as the assistant's
    message. `null`: the answer itself."""
    rejected: str | None = None
    """Column with the rejected response of a pair, for DPO and reward models."""
    pictures: str | None = None
    """Column with the prompt's pictures, one or a list (verl and TRL: images): bytes, paths beside the dataset's file,
    URLs, or Hugging Face's `Image`. Their places are `<image>` in the text, or parts of messages. `null`: there are
    none, but for those that parts of messages hold."""


@dataclass
class PartConfig:
    """A part of a mixture of datasets. What is `null` is as `data` has it."""

    weight: float = 1.0
    """Share of the part in the prompts, compared with the other parts' weights."""
    source: str | None = None
    """As `data.source`, of this part."""
    path: str | None = None
    """As `data.path`, of this part."""
    subset: str | None = None
    """As `data.subset`, of this part."""
    split: str | None = None
    """As `data.split`, of this part."""
    options: dict[str, Any] | None = None
    """As `data.options`, of this part."""
    size: int | None = None
    """As `data.size`, of this part."""
    columns: ColumnsConfig | None = None
    prompt_template: str | None = None
    """As `data.prompt_template`, of this part."""

    def __post_init__(self) -> None:
        above("data.mixture.NAME.weight", self.weight, 0)


@dataclass
class PhaseConfig:
    """A phase of a curriculum, in which rows of some levels alone are drawn."""

    levels: list[str] = field(default_factory=list)
    """Levels that are drawn, as text: ["2", "3"]. Empty: all."""
    steps: int | None = None
    """Steps that it lasts. `null`: to the end of the run."""

    def __post_init__(self) -> None:
        if self.steps is not None:
            at_least("data.curriculum.phases.NAME.steps", self.steps, 1)


@dataclass
class CurriculumConfig:
    """Rows are taken in their order, each with a probability that is that of its level: the spread of the rewards
    within its groups, beside the largest of any level. A level that is solved, or hopeless, is taken at `floor`."""

    by: str | None = None
    """What distinguishes levels: a column, or a field of one such as `metadata.level`, of reasoning_gym's own metadata
    such as num_terms, or of an environment's task; `data_source` for the parts of data.mixture; `row` for every row by
    itself, for data of which a run draws several epochs. `null`: no curriculum, all rows are taken."""
    floor: float = 0.05
    """Least probability that a row is taken; 1: all are. By it, levels that teach nothing now are measured again, at a
    twentieth of the cost of the rest: twice a step where it has 40 groups."""
    memory: int = 32
    """Groups of a level that its spread is a mean of, the newest ones weigh most. About a step's."""
    phases: dict[str, PhaseConfig] = field(default_factory=dict)
    """Phases by name, one after the other: {easy: {levels: ["2"], steps: 40}, all: {}}. After the last one all levels
    are drawn."""

    def __post_init__(self) -> None:
        check_bounds(self, "data.curriculum", memory=1, floor=(0, 1))


@dataclass
class DataConfig:
    source: str = AUTO
    """Kind of the source. auto: what data.path names. jsonl: files alone, in any format. huggingface: a dataset of the
    hub, or files. reasoning_gym: procedural tasks with their verifier. python: rows that a function makes. environment:
    the tasks that environment.name itself has."""
    path: str | None = None
    """Files, a dataset of the hub, or a name in the source. Files are read by their bytes and names: .jsonl, .json,
    .csv, .parquet or .arrow, also as .gz, .zst or .bz2; a file, a folder, a pattern such as data/*.parquet, or an
    fsspec URL such as s3://bucket/data. A dataset of the hub is OWNER/NAME. python: `file.py:function`, called with a
    seed. reasoning_gym: the task's name, e.g. chain_sum."""
    subset: str | None = None
    """Name of the configuration of a dataset of the hub, or of a folder in data.path, e.g. main."""
    split: str = "train"
    """Name of the split of a dataset of the hub, or of the files in a folder, such as train.jsonl or
    train-00000-of-00002.parquet. Where no file of a folder is named for a split, all of them are train."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the task itself (reasoning_gym), e.g. {max_digits: 2}."""
    size: int | None = None
    """Most rows that are used. reasoning_gym: how many problems are made (default 100000). python, environment: of what
    a generator makes, which may have no end (default 10000, and told where it makes more; lists are used whole)."""
    seed: int = 0
    """Seed of the order, and of the problems that reasoning_gym makes. Held-out problems use another."""
    shuffle: bool = True
    """True: another order in each epoch, by data.seed. False: the dataset's own, for data in an order of difficulty."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    mixture: dict[str, PartConfig] = field(default_factory=dict)
    """Several datasets by name, in the place of one: {gsm8k: {path: a.jsonl, weight: 3}, code: {path: b.jsonl}}. Their
    rows are drawn in these shares. Held-out problems are those of `evaluation`, by the first part's columns."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    teacher: str | None = None
    """Function that writes the demonstration, for SFT: `file.py:function` or `package.module:function`, `(task: dict)
    -> str`. `null`: the dataset's own column, or the answer."""
    rejected_teacher: str | None = None
    """Function that writes the rejected response, for DPO and reward models."""
    private_urls: bool = False
    """Whether pictures may be fetched from private addresses: of this machine, its network, its cloud. Without this a
    dataset of other people could make the run send requests to them."""
    system_prompt: str | None = None
    """System prompt, put before the user's text where the chat template is applied, and before messages that have none.
    An environment finds it in `task.messages`, with what was said before."""
    prompt_template: str = "{prompt}"
    """The user's text; `{prompt}` stands for the row's prompt column."""
    chat_template: bool = True
    """Apply the tokenizer's chat template. Off, or a tokenizer without one: the bare text."""
    max_prompt_tokens: int = 512
    """Most tokens of a prompt. A longer one is an error, or is skipped, as `too_long` says. Environments make
    their own prompts, which `rollout.max_model_len` bounds."""
    too_long: str = "error"
    """Treatment of longer prompts. error: end with the row's number, before anything starts. skip: leave the row out,
    counted as dropped/prompt_too_long."""
    no_answer: str = "error"
    """Treatment of rows whose answer is null or NaN, where the reward asks for it (by a parameter `answer` or
    `ground_truth`), or where it is the demonstration; likewise of the columns response and rejected. error: end with
    the row's number, before anything starts. skip: leave the row out, counted as dropped/no_answer."""

    on_change: str = "restart"
    """Behaviour of a resumed run whose data has changed: other rows, or another seed, shuffle or mixture. restart: it
    reports the change and draws from the first row on. error: it ends before anything starts. continue: it draws from
    the checkpoint's place in the data. Data that only grew is always continued: its new rows are drawn from the next
    epoch on."""

    @property
    def kind(self) -> str:
        """The source: python where it is left to the path, which names a function."""
        is_function = self.source == AUTO and re.search(r"\.py:\w+$", self.path or "")
        return "python" if is_function else self.source

    def part(self, name: str) -> "DataConfig":
        """Settings of a part of the mixture, as if it were all the data."""
        own = self.mixture[name]
        given = {key: value for key, value in vars(own).items() if key != "weight" and value is not None}
        return replace(self, mixture={}, **given)

    def __post_init__(self) -> None:
        one_of("data.source", self.source, SOURCES)
        one_of("data.too_long", self.too_long, ("error", "skip"))
        one_of("data.no_answer", self.no_answer, ("error", "skip"))
        one_of("data.on_change", self.on_change, ("restart", "error", "continue"))
        check_bounds(self, "data", max_prompt_tokens=1, size=1)


@dataclass
class EvaluationSetConfig:
    """Further held-out problems, of the source that `data` names and by its columns."""

    path: str | None = None
    """Path or name in the source. jsonl: the file; huggingface: the split; reasoning_gym: the task, `null` for that of
    data.path."""
    options: dict[str, Any] | None = None
    """Options of the problems. reasoning_gym: the task's options; `null`: data.options. environment: what its own
    options are changed by."""
    seed: int | None = None
    """Seed of the problems (reasoning_gym). `null`: evaluation.seed."""
    num_problems: int = 200
    """Most problems that are measured, the set's first ones."""

    def __post_init__(self) -> None:
        at_least("evaluation.sets.NAME.num_problems", self.num_problems, 1)


@dataclass
class EvaluationConfig:
    """Greedy decoding on problems that are never trained on, and samples beside it."""

    every_steps: int = 0
    """Evaluate every so many steps, and at the start and the end of the run. 0: never."""
    num_problems: int = 200
    """Most problems that are measured, the first ones. 200 tell 50% from 60%, and cost little beside a step."""
    share: int | str = AUTO
    """Engines that are lent to an evaluation where max_staleness > 0: they keep the version that is measured, and the
    rest goes on sampling. auto: as few as are done before the next evaluation, by the time that the last one took; at
    least one is left over. Where there is one engine, the next version waits for the evaluation."""
    num_workers: int = 0
    """Engines of evaluations' own, besides rollout.num_workers: they load the versions that are measured, and sample
    nothing else. So training goes on with all of its engines meanwhile, with max_staleness=0 too. 0: evaluations share
    the run's engines, as their own are idle between two evaluations."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the held-out problems, where they are others than those to train on. reasoning_gym: the task's
    options; {}: data.options. environment: what its own options are changed by."""
    num_samples: int = 0
    """Number k of samples of each problem beside the greedy response, by rollout.sampling, for accuracy/heldout_avg@k
    (the share that is right) and accuracy/heldout_pass@k (problems of which one is right at least). They show what a
    policy could still learn, at k times the cost. 0: none."""
    path: str | None = None
    """Held-out files, as data.path names files, or the name of another split of data.path; `null` with reasoning_gym:
    the same task by `seed`."""
    seed: int = 1_000_003
    """Seed of the held-out problems (reasoning_gym). Must differ from data.seed."""
    overlap: str = "drop"
    """Treatment of rows that are both trained on and held out, whatever the source. drop: a row to train on whose
    prompt (of an environment: whose task) evaluation has is passed over, counted as dropped/held_out; more than half of
    them are an error before anything starts. allow: they are trained on, as in a game that has no others. reasoning_gym
    makes others in their place."""
    sets: dict[str, EvaluationSetConfig] = field(default_factory=dict)
    """More held-out problems by name, each measured as accuracy/NAME: {hard: {path: hard.jsonl}}. None of them is
    trained on; stop_at_accuracy and the chart's first line are of the one above."""
    right_at: float = 1.0
    """Least reward of a response that counts as right for accuracy/…; with several `rewards` the first of them counts.
    1: partial credit does not count. A function that returns a dict with `acc`, as verl's do, says itself how right a
    response is."""
    stop_at_accuracy: float | None = None
    """Held-out accuracy, from 0 to 1, at which the run ends early, with the model that was measured. Where
    max_staleness > 0 and checkpoints are taken, steps go on while one is measured: each that is evaluated is saved, and
    the model is its checkpoint's. Otherwise no step is taken meanwhile. `null`: never."""

    def __post_init__(self) -> None:
        one_of("evaluation.overlap", self.overlap, ("drop", "allow"))
        if not auto_or_number("evaluation.share", self.share):
            at_least("evaluation.share", self.share, 1)
        check_bounds(
            self, "evaluation", every_steps=0, num_problems=1, num_workers=0, num_samples=0, stop_at_accuracy=(0, 1)
        )
        for name in self.sets:
            if not re.fullmatch(r"[A-Za-z]\w*", name) or name == "heldout":
                raise ConfigError(
                    f"evaluation.sets.{name}: a name is letters, digits and underscores, and heldout is that of "
                    "evaluation itself."
                )

    def metrics(self, *, in_environment: bool, policies: Iterable[str] = ()) -> list[str]:
        """Names of the metrics that say how good the policy is, or each of several."""
        sets, k = ("heldout", *self.sets), self.num_samples
        ends = ("", f"_avg@{k}", f"_pass@{k}") if k else ("",)
        rewards = [f"heldout_reward/{name}" for name in sets] if in_environment else []
        by_policy = [f"{policy}/{reward}" for policy in policies for reward in rewards]
        return [f"accuracy/{name}{end}" for name in sets for end in ends] + rewards + by_policy

    def of_set(self, name: str, data: DataConfig) -> tuple[DataConfig, "EvaluationConfig"]:
        """Settings of the held-out problems of a set, as if they were those of evaluation itself."""
        own = self.sets[name]
        if data.source == "reasoning_gym":
            options = data.options if own.options is None else own.options
            data = replace(data, path=own.path or data.path, options=options)
        seed = self.seed if own.seed is None else own.seed
        return data, replace(self, path=own.path, seed=seed, num_problems=own.num_problems, options={}, sets={})
