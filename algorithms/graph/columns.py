"""The columns that rows may have: names, dtypes, shapes. A stage reads and writes these by name.

Rows are samples (one prompt, one response). The standard columns are below; a user's own algorithm adds to them by
writing `Column("novelty", "float32")` where a name would do.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.conf.errors import DataflowError, suggest

DTYPES = ("uint8", "int32", "int64", "float32", "bool", "string", "binary")
SHAPES = ("sample", "token", "prompt", "list")


@dataclass(frozen=True)
class Column:
    """A column of the schema.

    `shape`: "sample" is one value a row; "token" one value a response token, ragged; "prompt" one a prompt token,
    ragged; "list" any number of values. `binary` is bytes of any length, for the shapes "sample" and "list".
    `per_group`: the value is the same for all samples of a group and is written and kept once.
    `nan_ok`: float columns refuse NaN and infinity unless this is set.
    """

    name: str
    dtype: str
    shape: str = "sample"
    per_group: bool = False
    nan_ok: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"column {self.name!r}: dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        if self.shape not in SHAPES:
            raise ValueError(f"column {self.name!r}: shape {self.shape!r} is none of {', '.join(SHAPES)}")
        if self.dtype == "binary" and self.shape not in ("sample", "list"):
            raise ValueError(f"column {self.name!r}: binary values are one a row (sample) or any number (list)")


STANDARD_COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        Column("prompt_ids", "int32", "prompt", per_group=True),
        Column("task", "string", per_group=True),  # JSON: the dataset's row, for rewards: {"prompt", "answer", ...}
        Column("pictures", "binary", "list", per_group=True),  # PNG or JPEG, in the order of their places
        Column("picture_ranges", "int32", "list", per_group=True),  # [offset, length] of each in `prompt_ids`
        Column("response_ids", "int32", "token"),
        Column("response_text", "string"),
        Column("policy", "string"),  # which has sampled the row, where several are trained
        Column("finish_reason", "string"),  # stop, length, or the limit of a trajectory
        Column("behavior_logprobs", "float32", "token"),  # of the engine, under the sampling distribution
        Column("token_versions", "int32", "token"),  # weight version that each token was sampled under
        Column("reward", "float32"),
        Column("reference_logprobs", "float32", "token"),
        Column("advantage", "float32"),
        # The tokens that a teacher finds likeliest in the place of each response token, J after one another, and its
        # log-probabilities of them; its prompt, where it reads another one than the policy.
        Column("candidate_ids", "int32", "list"),
        Column("teacher_candidates", "float32", "list"),
        Column("hinted_ids", "int32", "prompt", per_group=True),
        Column("preferred", "float32"),  # of a pair: +1 chosen, -1 rejected, 0 takes no part
        Column("desirable", "float32"),  # of a single response: +1 good, -1 bad, 0 takes no part
        Column("greedy_text", "string"),  # what the engine says at temperature 0, once a group
        Column("greedy_reward", "float32"),
        # Of a trajectory: `response_ids` has what was sampled in all its turns, and these say what stood in between.
        Column("context_ids", "int32", "list"),  # tokens that were not sampled, in the order of `spans`
        Column("spans", "int32", "list"),  # [segment, context tokens, sampled tokens] after one another
        Column("token_temperatures", "float32", "token"),  # at which each token's log-probability is computed
        Column("turn_tokens", "int32", "list"),  # sampled tokens of each turn; their sum is the response's length
        Column("turn_rewards", "float32", "list"),  # what each turn was given
        Column("turn_ids", "int32", "list"),  # of each turn, in the order in which they were played
        Column("turn_states", "int64", "list"),  # hash of what each turn answered; where a stage reads it
        Column("transcript", "string"),  # JSON: what was said, for people
        Column("seen_pictures", "binary", "list"),  # of all sequences, one for each triple of `seen_ranges`
        Column("seen_ranges", "int32", "list"),  # [segment, offset in its sequence, length] after one another
        # With rollout.router_replay: a record of bytes a token that the engine read (workers/models/routed_experts.py).
        Column("routed_experts", "uint8", "list"),
    )
}

ROUTED_EXPERTS = "routed_experts"
TURN_STATES = "turn_states"
POLICY = "policy"
CANDIDATES, CANDIDATE_LOGPROBS = "candidate_ids", "candidate_logprobs"
"""The column of tokens that the trainer scores beside those of the response, and the argument by which a loss gets
their log-probabilities, `[B, T, J]` with gradient."""
HINTED = "hinted_ids"
ENVIRONMENT_TASK = "environment_task"
"""Key of an environment's own task in the column `task`."""
TASK_MESSAGES = "task_messages"
"""Key of the column `task` for the conversation that a prompt or an environment's task begins with."""
OPENS_THINKING = "prompt_opens_thinking"
"""Key of the column `task` that is true where the prompt has begun the thinking. Rewards do not see it."""
PROMPT_COLUMNS = ("prompt_ids", "task")
ROLLOUT_COLUMNS = ("response_ids", "response_text", "finish_reason", "behavior_logprobs", "token_versions")
SEQUENCE_COLUMNS = ("context_ids", "spans", "token_temperatures")
"""Columns of a trajectory, in the place of `prompt_ids`: with `response_ids` they give the sequences that a model
reads, and how it scores what was sampled."""
PROMPT_PICTURES, SEEN_PICTURES = ("pictures", "picture_ranges"), ("seen_pictures", "seen_ranges")
"""Columns of the pictures that a prompt has, and of those that a trajectory has seen."""
TRAJECTORY_COLUMNS = (*ROLLOUT_COLUMNS, *SEQUENCE_COLUMNS, "turn_tokens", "turn_rewards", "turn_ids", "transcript")


def fields_of(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields of a row by name, of all its columns: those of an environment's own task, or the columns with those of
    reasoning_gym's metadata, such as num_terms."""
    if ENVIRONMENT_TASK in columns:
        return {**columns[ENVIRONMENT_TASK]["data"]}
    entry = columns.get("entry")
    metadata = entry.get("metadata", {}) if isinstance(entry, Mapping) else {}
    return {**metadata, **columns}


def field_in(fields: Mapping[str, Any], name: str) -> str | None:
    """The value of a field as text, or of a field of one, such as `about.kind`. None: there is no such field."""
    found: Any = fields
    for part in (name,) if name in fields else name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return None if found is None else str(found)


def field_of(task: str, name: str, key: str) -> str:
    """The value of a field of the column `task`, as text. `key`: the configuration's, for the `DataflowError` of a task
    that lacks the field."""
    fields = fields_of(json.loads(task))
    if (found := field_in(fields, name)) is None:
        raise DataflowError(f"{key}={name}: a task has no such field{suggest(name, fields)}")
    return found


def as_column(column: "str | Column") -> Column:
    """The column of that name in the standard schema, or the column itself. Raises `KeyError` for unknown names."""
    return column if isinstance(column, Column) else STANDARD_COLUMNS[column]
