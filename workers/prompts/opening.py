"""The construction of a run's source of prompts from its configuration: dataset, tokenizer and limits put together.

It is used both for training and for the held-out problems of evaluation.
"""

from penstock.conf.data import ENVIRONMENT
from penstock.conf.errors import ConfigError, DataError
from penstock.conf.run import RunConfig
from penstock.workers.environments.environment import make_environment
from penstock.workers.prompts.apart import Apart
from penstock.workers.prompts.dataset import open_dataset
from penstock.workers.prompts.environment_tasks import EnvironmentTasks
from penstock.workers.prompts.source import PromptSource, PromptStart
from penstock.workers.prompts.task import PromptDataset
from penstock.workers.prompts.tokenization import PromptEncoder, TokenLimits, load_tokenizer


def open_source(
    config: RunConfig,
    model_path: str,
    *,
    rows_are: str = "prompts",
    held_out: bool = False,
    start: PromptStart | None = None,
) -> PromptSource:
    """Open the groups of a run in order, epoch after epoch; or the held-out ones in the dataset's own order.

    `rows_are`: "prompts", "tasks", "demonstrations" or "preferences". `start`: the place where a resumed run goes on.
    Raises `DataError`, `ConfigError` or `ModelError`.
    """
    dataset = open_rows(config, held_out=held_out)
    if dataset is None:
        raise DataError("evaluation.path=null: there are no held-out problems to evaluate on.")
    limits = TokenLimits.of_run(config, with_responses=rows_are != "prompts")
    encoder = PromptEncoder(load_tokenizer(model_path), config.data, limits, config.model.chat_template_kwargs)
    start = start or PromptStart()
    return PromptSource(
        dataset,
        encoder,
        config.data,
        cursor=start.cursor,
        first_group=start.first_group,
        rows_are=rows_are,
        once=held_out,
        apart=None if held_out else open_apart(config),
    )


def open_apart(config: RunConfig) -> Apart:
    """Problems that evaluation measures, and no step may train on. None where it measures nothing, or with
    `evaluation.overlap=allow`. Raises `DataError`, `ConfigError`."""
    evaluation = config.evaluation
    if not evaluation.every_steps or evaluation.overlap == "allow":
        return Apart()
    configs = [config, *map(config.with_set, evaluation.sets)]
    held_out = [open_rows(one, held_out=True) for one in configs]
    return Apart.of(dataset for dataset in held_out if dataset is not None)


def open_rows(config: RunConfig, *, held_out: bool = False) -> PromptDataset | None:
    """Open the rows to train on, or the held-out part: tasks of the run's environment with `data.source=environment`,
    rows of a dataset otherwise. None: nothing is held out. Raises `DataError`, `ConfigError`."""
    if config.data.source != ENVIRONMENT:
        return open_dataset(config.data, config.evaluation, held_out=held_out)
    name = config.environment.name
    if name is None:
        raise ConfigError("data.source=environment: there is none. Set environment.name.")
    environment = make_environment(config.environment, config.imports)
    if not callable(getattr(environment, "tasks", None)):
        raise ConfigError(
            f"data.source=environment: {name} has no method tasks(seed). Give it one, or take its tasks from a "
            "dataset: data.source=jsonl."
        )
    seed = config.evaluation.seed if held_out else config.data.seed
    size = config.evaluation.num_problems if held_out else config.data.size
    return EnvironmentTasks(environment.tasks(seed), size, name)
