"""Prerequisites of a run, which are checked before anything starts: the model's directory, the sandbox for code that
models write, and the experiment trackers.

No weights are loaded: the check reads the directory's JSON files, and names and shapes of the weights. The sandbox has
to hold where the code runs. On a running cluster the nodes' agents try it when the run starts
(`control/lifecycle.py`). Of trackers, their packages have to be there, and what they need of the user; nothing is
sent.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.conf.checks import EXTRAS, need_extra, one_of
from penstock.conf.errors import ConfigError, ModelError
from penstock.conf.model import FreshModelConfig, ModelConfig
from penstock.conf.reward import has_own_judge
from penstock.conf.rollout import RolloutConfig
from penstock.conf.run import RunConfig
from penstock.conf.secret import hide_in
from penstock.conf.tracking import WANDB_MODES, TrackingConfig
from penstock.network.host import bypass_proxy
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.cluster.ray_cluster import is_elsewhere
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.model_shape import fresh_shape
from penstock.orchestrator.run_directory.run_place import try_place
from penstock.workers.fresh_model import character_tokenizer, fresh_processor, model_config, vocabulary_size
from penstock.workers.models.model_files import CONFIG, longest_context, longest_short_context, weight_files
from penstock.workers.models.tokenizer import load_tokenizer
from penstock.workers.node.hub_models import may_be_hub_id
from penstock.workers.pictures.processor import PictureProcessor, auto_class
from penstock.workers.reward.code import limits_of
from penstock.workers.runtime.builds import check_build
from penstock.workers.sandbox.execution import Limits
from penstock.workers.sandbox.workspace import LIMITS, checked_here
from penstock.workers.weights.publication.adapter import find_targets

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
SANDBOXED = ("python_tests", "sql_result")
"""Rewards that run code."""
IN_WORKSPACES = ("repository", "harbor")
"""Environments whose commands run in workspaces."""
WANDB_OWN_MODES = (*WANDB_MODES, "shared", "dryrun", "run")
"""Modes that W&B itself takes."""


# The model.


def check_model(config: RunConfig, *, samples: bool = True) -> str:
    """Describe the policy in a few words. `samples`: an engine of the run has it. Raises `ModelError` for one that is
    nowhere, naming the missing files or weights, and `ConfigError` for lengths, heads or adapters that do not fit."""
    if config.model.reference_path is not None:
        _describe(config.model.reference_path, "model.reference_path", config.rollout.max_model_len)
    model = starting_model_config(config)
    if config.rollout.router_replay:
        _check_has_routers(model)
    if model.path is None:
        told, lm = _describe_fresh(model.fresh, config.rollout.max_model_len), _empty_fresh_model(model.fresh)
    else:
        told, lm = _describe(model.path, "model.path", config.rollout.max_model_len)
    if config.trainer.lora.rank:
        find_targets(lm, config.trainer.lora)
    if samples:
        _check_heads(config.rollout, lm, "rollout.engine")
    return told


def check_own_models(config: RunConfig) -> str:
    """Describe the models of policies that are whole models. Raises as `check_model` does, and `ConfigError` for one
    with another tokenizer: all read the same conversations."""
    starts, first = {}, tokenizer_of(config)
    for name in config.trainer.own_models:
        path, key = config.model.paths.get(name), f"model.paths.{name}"
        starts[name] = path or "model.path"
        if path is None:
            continue
        _, lm = _describe(path, key, config.rollout.max_model_len)
        _check_heads(config.rollout, lm, "rollout.engine")
        own = load_tokenizer(path)
        if (own.get_vocab(), own.chat_template) != (first.get_vocab(), first.chat_template):
            raise ConfigError(
                f"{key}={path}: its tokenizer or chat template is not that of model.path, and all policies read the "
                "same conversations. Choose models of one family."
            )
    return ", ".join(f"{name} from {path}" for name, path in starts.items())


def check_other_model(path: str, key: str, *, scores: bool = False, judge: RolloutConfig | None = None) -> str:
    """Describe a model that is not trained in a few words. `scores`: it has a scalar head. `judge`: the settings of the
    engine that has it. Raises `ModelError` for one that is nowhere, and for weights that are not the model's,
    `ConfigError` for one that its engine does not take."""
    if not _is_local(path, key):
        _check_at_hub(path, key)
    lm = _empty_model(path, key, scores=scores)
    if judge is not None:
        _check_heads(judge, lm, "reward.judge.engine")
    return path


def _empty_model(path: str, key: str, *, scores: bool = False) -> Any:
    """The model without weights. Weights in a directory are checked; those of the hub once they are fetched."""
    from penstock.workers.weights.checkpoint_form import check_model, empty_model  # late: transformers takes seconds

    try:
        if Path(path).expanduser().exists():
            return check_model(str(Path(path).expanduser()), key, scores=scores)
        return empty_model(path, scores=scores)
    except (OSError, ValueError) as error:
        raise ModelError(f"{key}={path}: transformers makes no model of its configuration: {error}") from error


def _empty_fresh_model(model: FreshModelConfig) -> Any:
    import torch

    made = model_config(model, vocabulary_size(model))
    with torch.device("meta"):
        return auto_class(made).from_config(made)


def _check_heads(engine: RolloutConfig, lm: Any, key: str) -> None:
    """Refuse a model whose heads the engine has no kernel for on a CPU."""
    sizes = engine.capabilities.cpu_head_sizes
    text = lm.config.get_text_config()
    num_heads = getattr(text, "num_attention_heads", None)
    size = getattr(text, "head_dim", None) or (text.hidden_size // num_heads if num_heads else None)
    is_latent = getattr(text, "kv_lora_rank", None) is not None  # whose heads are made of several parts
    if not sizes or engine.num_gpus_per_worker or size is None or is_latent or size in sizes:
        return
    raise ConfigError(
        f"{key}={engine.engine}: its CPU build has kernels for heads of {', '.join(map(str, sizes))} numbers, and "
        f"{type(lm).__name__} has heads of {size}. Set {key}=hf, or choose another model."
    )


def starting_model_config(config: RunConfig) -> ModelConfig:
    """The model's configuration in the run that makes the first weights: this one, or its warm start."""
    if config.model.path is not None or config.warm_start.recipe is None:
        return config.model
    return starting_model_config(load_config([f"recipe={config.warm_start.recipe}", *config.warm_start.overrides]))


def tokenizer_of(config: RunConfig) -> Any:
    """The tokenizer that prompts will be encoded with. Raises `ModelError`."""
    model = starting_model_config(config)
    return character_tokenizer(model.fresh) if model.path is None else load_tokenizer(model.path)


def processor_of(config: RunConfig) -> PictureProcessor:
    """The processor of the pictures that prompts will have. Raises `ConfigError` for a model whose pictures are not
    read."""
    model = starting_model_config(config)
    return PictureProcessor.of(model.path) if model.path is not None else fresh_processor(model.fresh)


def _describe_fresh(model: FreshModelConfig, max_model_len: int) -> str:
    longest = model.max_position_embeddings
    _check_length(f"model.fresh.max_position_embeddings={longest}", longest, max_model_len)
    kind = f"Qwen3-MoE with {model.num_experts} experts a layer" if model.num_experts else "Qwen2"
    kind = "Qwen2.5-VL" if model.num_vision_layers else kind
    return f"a fresh {kind}, {fresh_shape(model).num_parameters / 1e6:.1f}M parameters, character tokenizer"


def _is_local(path: str, key: str) -> bool:
    """Return whether a model is a directory of this machine. Raises `ModelError` for what can be no hub id either."""
    if Path(path).expanduser().exists():
        return True
    if not may_be_hub_id(path):
        raise ModelError(f"{key}={path}: there is no such directory.")
    return False


def _check_at_hub(path: str, key: str) -> None:
    """See that the hub, or what was fetched from there before, has the configuration of a model. Raises
    `ModelError`."""
    from transformers.utils import cached_file

    try:
        cached_file(path, CONFIG)
    except OSError as error:
        why = str(error).partition("\n")[0]
        raise ModelError(
            f"{key}={path}: there is no such directory, and the Hugging Face hub does not give such a model: {why} Set "
            f"{key} to a directory, or to a hub id such as Qwen/Qwen2.5-0.5B-Instruct."
        ) from error


def _describe(path: str, key: str, max_model_len: int) -> tuple[str, Any]:
    """A model in a few words, and without weights."""
    directory = Path(path).expanduser()
    if not _is_local(path, key):
        _check_at_hub(path, key)
        told = f"{path} of the Hugging Face hub, fetched at the start unless it is in the cache"
        return told, _empty_model(path, key)
    model = _read_config(directory, key)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"{key}={path}: has no tokenizer (none of {', '.join(TOKENIZER_FILES)}). "
            f"Save it there: tokenizer.save_pretrained({path!r})."
        )
    if key != "model.reference_path" and model.get("quantization_config"):
        method = model["quantization_config"].get("quant_method", "a method without a name")
        raise ConfigError(
            f"{key}={path}: its weights are quantized ({method}), so they cannot be trained, and its engines cannot "
            "take publications. Use the model that is not quantized; for quantized engines use online quantization, "
            "such as rollout.engine_options={quantization: fp8_per_channel}."
        )
    longest, longest_short = longest_context(model), longest_short_context(model)
    if longest is not None:
        _check_length(f"{key}={path}: {longest} tokens, by its config.json", longest, max_model_len)
    if longest_short is not None and max_model_len > longest_short:
        raise ConfigError(
            f"rollout.max_model_len={max_model_len}: {key}={path} has LongRoPE, whose long factors begin at "
            f"{longest_short} tokens. Engines that serve longer sequences take them for every token, the trainer for "
            f"long rows alone: log-probabilities would differ. Set rollout.max_model_len={longest_short} or less."
        )
    lm = _empty_model(path, key)
    size_mib = sum((directory / name).stat().st_size for name in weight_files(directory)) / 2**20
    return f"{path}: {model.get('model_type', 'unknown type')}, {size_mib:,.0f} MiB of weights", lm


def _check_has_routers(model: ModelConfig) -> None:
    """Refuse `rollout.router_replay` for a model that is known to be dense."""
    directory = Path(model.path).expanduser() if model.path else None
    is_dense = directory is None and not model.fresh.num_experts
    if directory is not None and directory.exists():
        is_dense = not _read_config(directory, "model.path").get("num_experts_per_tok")
    if is_dense:
        raise ConfigError(
            f"rollout.router_replay=true: {model.path or 'the fresh model'} is no mixture of experts, by its "
            "configuration. Leave it out, or choose another model.path (model.fresh.num_experts)."
        )


def _read_config(directory: Path, key: str) -> dict[str, Any]:
    file = directory / "config.json"
    if not file.is_file():
        raise ModelError(f"{key}={directory}: has no config.json, so it is no HF model directory.")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ModelError(f"{file}: not valid JSON ({error}).") from None
    return values if isinstance(values, dict) else {}


def _check_length(what: str, longest: int, max_model_len: int) -> None:
    if max_model_len > longest:
        raise ConfigError(
            f"rollout.max_model_len={max_model_len} is more than the model takes ({what}). Lower rollout.max_model_len."
        )


# The sandbox of code that models write.


def runs_code(config: RunConfig) -> bool:
    """Return whether the run executes code that a model wrote, as far as the configuration shows."""
    in_workspaces = config.environment.name in IN_WORKSPACES
    return bool(_options_of_rewards(config)) or _environment_runs_code(config) or in_workspaces


def limits_of_code(config: RunConfig) -> list[Limits]:
    """Limits of the code that models write, each once; empty for a run that runs no code. Raises `ConfigError`."""
    found = [limits_of(options.get("limits")) for options in _options_of_rewards(config)]
    if _environment_runs_code(config):
        found.append(Limits.of(config.environment.sandbox))
    if config.environment.name in IN_WORKSPACES:
        found.append(replace(LIMITS, require_cgroup=config.environment.sandbox.require_cgroup))
    return list(dict.fromkeys(found))


def check_sandbox(config: RunConfig) -> str:
    """Try the sandbox, if it has to hold on this machine. Returns what was found. Raises `SandboxUnavailable`,
    `ConfigError`."""
    all_limits = limits_of_code(config)
    return "tried on the cluster's nodes when the run starts" if is_elsewhere() else checked_here(all_limits)


def _options_of_rewards(config: RunConfig) -> list[Mapping[str, Any]]:
    """Options of the rewards that run code."""
    return [options for function, options in _rewards_of(config) if function in SANDBOXED]


def _rewards_of(config: RunConfig) -> list[tuple[str, Mapping[str, Any]]]:
    """Functions and options of all rewards that the configuration names."""
    of_environment = config.environment.options
    return [
        (config.reward.function, config.reward.options),
        *((one.function, one.options) for one in config.rewards),
        (str(of_environment.get("reward")), of_environment.get("reward_options") or {}),
    ]


def _environment_runs_code(config: RunConfig) -> bool:
    """Return whether the environment runs code. A user's own does not say so, unless it requires a control group."""
    environment = config.environment
    runs_python = "python" in (environment.options.get("tools") or ())
    return runs_python or environment.sandbox.require_cgroup


# Packages.


def check_packages(config: RunConfig, plan: Sequence[ActorPlan] = ()) -> str:
    """Name the packages that actors import because a key says so. Raises `ConfigError` for one that is not
    installed, and for an engine whose build would take a GPU that nobody has reserved."""
    used = packages_of(config, plan)
    for package, key in used.items():
        if package in EXTRAS:
            need_extra(package, key)
        elif find_spec(package.replace("-", "_")) is None:
            name, instead = key.partition("=")[0], "sdpa" if package == "flash-attn" else "false"
            raise ConfigError(
                f"{key} needs the package {package}, which is not installed here. Run pip install {package}, or set "
                f"{name}={instead}."
            )
    if "rollout" in {actor.role for actor in plan}:
        check_build(config.rollout, anywhere=False)
    if _has_judges(config, plan):
        check_build(config.reward.judge.rollout, "reward.judge", anywhere=False)
    return ", ".join(used)


def _has_judges(config: RunConfig, plan: Sequence[ActorPlan]) -> bool:
    """Return whether reward actors have engines of their own."""
    scores = any(actor.role == "reward" for actor in plan)
    return scores and any(has_own_judge(*reward) for reward in _rewards_of(config))


def packages_of(config: RunConfig, plan: Sequence[ActorPlan]) -> dict[str, str]:
    """The packages that actors import because a key says so: engines, and kernels that no extra of Penstock installs.
    The values are the keys."""
    roles = {actor.role for actor in plan}
    engines = (
        ("reward.judge.engine", config.reward.judge.engine, _has_judges(config, plan)),
        ("trainer.engine", config.trainer.engine, "trainer" in roles),
        ("rollout.engine", config.rollout.engine, "rollout" in roles),
    )
    used = {engine: f"{key}={engine}" for key, engine, is_used in engines if is_used and engine in EXTRAS}
    if config.model.attention == "flash_attention_2":
        used["flash-attn"] = "model.attention=flash_attention_2"
    if config.trainer.liger:
        used["liger-kernel"] = "trainer.liger=true"
    return used


# The trackers.


def check_trackers(tracking: TrackingConfig) -> str:
    """Describe the trackers in a few words; those on this machine are asked without a proxy from now on. Raises
    `ConfigError`."""
    bypass_proxy()
    return ", ".join(CHECKS[name](tracking) for name in tracking.sinks if name in CHECKS)


def need_modules(sink: str, modules: str, packages: str) -> None:
    """Raise `ConfigError` if a module of a sink cannot be found."""
    if any(find_spec(module) is None for module in modules.split()):
        raise ConfigError(
            f"tracking.sinks: {sink} needs what is not installed. `pip install {packages}`, or leave {sink} out."
        )


def _try_directory(given: str | None, key: str, variable: str) -> None:
    """Raise `ConfigError` for a directory that cannot be made. `variable`: of the environment, which holds without a
    value of the key."""
    if place := given or os.environ.get(variable):
        try_place(place, key if given else variable)


def _wandb(tracking: TrackingConfig) -> str:
    """Check that W&B has a key; without one it would ask for it during the run."""
    need_modules("wandb", "wandb", "wandb")
    _try_directory(tracking.wandb.directory, "tracking.wandb.directory", "WANDB_DIR")
    import wandb  # late: half a second

    if mode := tracking.wandb.mode or os.environ.get("WANDB_MODE"):
        one_of("WANDB_MODE", mode, WANDB_OWN_MODES)
    mode = mode or wandb.setup().settings.mode
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        raise ConfigError(
            "tracking.sinks: wandb has no key. Run `wandb login`, set WANDB_API_KEY, or tracking.wandb.mode=offline."
        )
    return f"wandb {mode}"


def _mlflow(tracking: TrackingConfig) -> str:
    need_modules("mlflow", "mlflow", "mlflow-skinny")
    uri = tracking.mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None or uri.startswith("sqlite:"):
        need_modules("mlflow", "sqlalchemy alembic", "sqlalchemy alembic")
    return f"mlflow at {hide_in(uri or 'mlflow.db in output_dir')}"


def _trackio(tracking: TrackingConfig) -> str:
    need_modules("trackio", "trackio", "trackio")
    _try_directory(tracking.trackio.directory, "tracking.trackio.directory", "TRACKIO_DIR")
    server = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
    if server:
        return f"trackio at {server.partition('?')[0]}"  # what follows has a token
    return f"trackio in {tracking.trackio.directory or os.environ.get('TRACKIO_DIR') or 'its own folder'}"


CHECKS: Mapping[str, Callable[[TrackingConfig], str]] = {"wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
