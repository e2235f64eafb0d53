"""What can be known to be wrong is told before anything starts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from safetensors.torch import load_file, save_file

from penstock.algorithms.catalogue import build_dataflow, dataflow_of
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.losses import policy_loss
from penstock.conf.capabilities import ROLLOUT_ENGINES
from penstock.conf.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DataflowError,
    ModelError,
    PenstockError,
    ResourceError,
    SandboxUnavailable,
)
from penstock.conf.model import FreshModelConfig
from penstock.conf.run import RunConfig
from penstock.conf.trainer import PolicyConfig
from penstock.orchestrator.cluster.placement.actors import plan_actors
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.model_shape import fresh_shape
from penstock.orchestrator.configuration.prerequisites import (
    check_model,
    check_own_models,
    limits_of_code,
    processor_of,
)
from penstock.orchestrator.configuration.resolved import ResolvedRun
from penstock.orchestrator.configuration.validate import check_run, checks
from penstock.workers.fresh_model import build_fresh_model, model_config, vocabulary_size
from penstock.workers.sandbox.execution import Limits
from penstock.workers.sandbox.workspace import LIMITS
from tests.workers.agents.gateway.formats.real_templates import trl_template

SMALL = FreshModelConfig(
    num_layers=1, hidden_size=64, intermediate_size=32, num_heads=2, num_kv_heads=1, max_position_embeddings=256
)


def resolved(config: RunConfig, flow: Dataflow) -> ResolvedRun:
    return ResolvedRun(config, flow, plan_actors(flow, config))


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    build_fresh_model(directory, SMALL, seed=0)
    return directory


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": f"{i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(20)))
    return file


def check(*words: str) -> None:
    config = load_config(words)
    flow = build_dataflow(config.algorithm)
    check_run(resolved(config, flow))


def test_responses_of_a_dataset_are_judged_without_an_engine() -> None:
    def roles(*words: str) -> list[str]:
        config = load_config(["recipe=kto", *words])
        return [actor.role for actor in plan_actors(build_dataflow(config.algorithm), config)]

    assert {"reward", "rollout"} <= set(roles())
    without = roles("evaluation.every_steps=0")
    assert "reward" in without
    assert "rollout" not in without


def refused(kind: type[PenstockError], *words: str) -> str:
    with pytest.raises(kind) as caught:
        check(*words)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("recipe", ["arithmetic", "arithmetic_sft"])
def test_the_recipes_for_a_cpu_pass(recipe: str) -> None:
    check(f"recipe={recipe}")


def test_gsm8k_with_the_tiny_model_passes_on_a_file_of_its_format(rows: Path) -> None:
    check("recipe=gsm8k", "model=tiny", f"data.path={rows}")


def test_gpus_that_are_not_there_are_refused(rows: Path) -> None:
    assert "64 GPU(s)" in refused(
        ResourceError, f"data.path={rows}", "rollout.num_workers=64", "rollout.num_gpus_per_worker=1"
    )


def test_a_model_directory_without_a_tokenizer_is_refused(model: Path, rows: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((model / name).read_bytes())
    words = (f"data.path={rows}", f"model.path={bare}", "rollout.max_model_len=256", "rollout.sampling.max_tokens=8")
    assert "no tokenizer" in refused(ModelError, *words)
    (bare / "config.json").unlink()
    assert "no config.json" in refused(ModelError, *words)
    assert "no such directory" in refused(ModelError, f"data.path={rows}", f"model.path={tmp_path}/gone")


def test_a_model_that_is_neither_here_nor_at_the_hub_is_refused(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for key in ("model.path", "model.reference_path"):
        message = refused(ModelError, f"data.path={rows}", f"{key}=Nobody/no-such-model")
        assert message.startswith(f"{key}=Nobody/no-such-model: there is no such directory, and the Hugging Face hub ")
        assert f"Set {key} to a directory, or to a hub id" in message


@pytest.fixture(scope="module")
def lacking(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model without the weights of a norm."""
    directory = tmp_path_factory.mktemp("lacking") / "lacking"
    shutil.copytree(model, directory)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


LENGTHS = ("rollout.max_model_len=256", "rollout.sampling.max_tokens=8")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.path", []),
        ("model.reference_path", ["model=tiny"]),
        ("+model.paths.teacher", ["algorithm=distill", "model=tiny"]),
        ("+model.paths.judge", ["reward.function=judge", "model=tiny"]),
    ],
)
def test_weights_that_a_models_files_lack_are_told_by_key(
    key: str, words: list[str], lacking: Path, rows: Path
) -> None:
    message = refused(ModelError, f"data.path={rows}", *words, *LENGTHS, f"{key}={lacking}")
    assert message.startswith(f"{key.lstrip('+')}={lacking}: its weights are not those of Qwen2ForCausalLM")
    assert "it lacks 1 of 15 tensors: model.norm.weight" in message


def test_a_reward_model_needs_a_head(model: Path, rows: Path) -> None:
    words = ("algorithm=ppo", "algorithm.reward_model=true", "model=tiny")
    message = refused(ModelError, f"data.path={rows}", *words, *LENGTHS, f"+model.paths.reward_model={model}")
    assert "score.weight. A language model has no such head. Choose a reward model" in message


def test_adapters_whose_targets_match_nothing_are_refused(model: Path, rows: Path) -> None:
    words = ("trainer.lora.rank=4", "trainer.lora.target_modules=[query_key_value]", f"data.path={rows}", *LENGTHS)
    for brought in (f"model.path={model}", "model=tiny"):
        message = refused(ConfigError, brought, *words)
        assert "no linear layer of Qwen2ForCausalLM is called 'query_key_value'" in message


def test_heads_that_vllm_has_no_cpu_kernel_for_are_refused_and_hf_takes_them(rows: Path, tmp_path: Path) -> None:
    build_fresh_model(tmp_path, replace(SMALL, hidden_size=16), seed=0)
    for brought in (f"model.path={tmp_path}", "model.fresh.hidden_size=32"):
        words = (f"data.path={rows}", brought, *LENGTHS)
        message = refused(ConfigError, *words)
        assert message.startswith("rollout.engine=vllm: its CPU build has kernels for heads of 32, 64, ")
        assert "Qwen2ForCausalLM has heads of 8. Set rollout.engine=hf, or choose another model." in message
        check(*words, "rollout.engine=hf")
    judge = ("reward.function=judge", "rollout.engine=hf", f"+model.paths.judge={tmp_path}")
    assert "Set reward.judge.engine=hf" in refused(ConfigError, f"data.path={rows}", *LENGTHS, *judge)


@pytest.mark.real
def test_the_sizes_of_heads_are_vllms() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(ROLLOUT_ENGINES["vllm"].cpu_head_sizes) == CPUAttentionBackend.get_supported_head_sizes()


def test_a_length_that_the_model_does_not_take_is_refused(model: Path, rows: Path) -> None:
    words = (f"data.path={rows}", f"model.path={model}")
    message = refused(ConfigError, *words, "rollout.max_model_len=512")
    assert "rollout.max_model_len=512" in message
    assert "256" in message
    assert "rollout.max_model_len" in refused(ConfigError, f"data.path={rows}", "rollout.max_model_len=4096")


def test_a_model_that_was_quantized_before_is_refused(model: Path, rows: Path, tmp_path: Path) -> None:
    quantized = tmp_path / "quantized"
    shutil.copytree(model, quantized)
    config = json.loads((quantized / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (quantized / "config.json").write_text(json.dumps(config))
    lengths = ("rollout.max_model_len=256", "rollout.sampling.max_tokens=8")
    message = refused(ConfigError, f"data.path={rows}", f"model.path={quantized}", *lengths)
    assert "quantized (gptq)" in message
    assert "cannot take publications" in message
    assert "online quantization" in message


def test_a_scaled_rope_stretches_the_length_and_longrope_ends_early(model: Path, rows: Path, tmp_path: Path) -> None:
    scaled = tmp_path / "scaled"
    shutil.copytree(model, scaled)
    config = json.loads((scaled / "config.json").read_text())
    words = (f"data.path={rows}", f"model.path={scaled}", "rollout.max_model_len=512")
    for rope, message in (
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, None),
        ({"rope_type": "linear", "factor": 1.5, "rope_theta": 1e4}, "384 tokens, by its config.json"),
        ({"rope_type": "longrope", "original_max_position_embeddings": 128}, "256 tokens"),
    ):
        (scaled / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
        if message is None:
            check(*words)
        else:
            assert message in refused(ConfigError, *words)
    words = (*words[:2], "rollout.max_model_len=256", "rollout.sampling.max_tokens=8")
    assert "begin at 128 tokens" in refused(ConfigError, *words)


def test_each_process_of_an_engine_has_a_gpu_or_the_engine_is_refused() -> None:
    config = load_config(["rollout.num_gpus_per_worker=1", "rollout.tensor_parallel_size=4"])
    plan = plan_actors(build_dataflow(config.algorithm), config)
    assert [actor.num_gpus for actor in plan if actor.role == "rollout"] == [4]
    parts = "rollout.num_gpus_per_worker=0.5", "rollout.tensor_parallel_size=2"
    assert "would have all its processes on one" in refused(ConfigError, *parts)
    load_config([*parts, "trainer.num_gpus_per_rank=0.5", "trainer.num_ranks=2", "placement=colocated"])
    message = refused(ConfigError, "rollout.num_gpus_per_worker=2")
    assert message.endswith("set rollout.num_gpus_per_worker=1 and rollout.tensor_parallel_size=2.")


def test_a_dataset_that_is_not_there_or_empty_or_of_another_shape_is_refused(rows: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "gone.jsonl" in refused(DataError, f"data.path={tmp_path}/gone.jsonl")
    assert "empty.jsonl" in refused(DataError, f"data.path={empty}")
    assert "data.path" in refused(DataError, "trainer.max_steps=1")
    message = refused(DataError, f"data.path={rows}", "data.columns.prompt=questoin")
    assert "line 1" in message
    assert "'question'" in message


def found(name: str, *words: str) -> str:
    """What a check found."""
    config = load_config(words)
    flow = dataflow_of(config)
    return next(check for check in checks(resolved(config, flow)) if check.name == name).look()


def test_rows_without_an_answer_are_told_and_refused_where_one_is_needed(tmp_path: Path) -> None:
    answers: list[str | float | None] = ["1", None, float("nan"), "2"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{i}?", "answer": one}) + "\n" for i, one in enumerate(answers)))
    words = (f"data.path={rows}", "model=tiny", "evaluation.every_steps=1", f"evaluation.path={rows}",
             "evaluation.overlap=allow")  # fmt: skip
    assert "rows.jsonl line 2: no answer, which the reward asks for" in refused(DataError, *words)
    skips = (*words, "data.no_answer=skip")
    assert "4 rows, 4 read" in found("data", *skips)
    assert found("data", *skips).endswith("; 2 without an answer and left out")
    assert found("held-out data", *skips).endswith("; 2 without an answer and left out")
    assert "2 of 4 rows, which have no answer" in found("rows left out", *skips)
    found_by_digits = found("data", *words, "reward.function=digits")
    assert found_by_digits.endswith("; 2 without an answer, which nothing asks for")
    (tmp_path / "agent.py").write_text("async def play(task, client):\n    pass\n")
    asked = found("data", *words[:2], f"environment.name={tmp_path}/agent.py:play")
    assert asked.endswith("; 2 without an answer, which the environment is told as null")


def test_a_prompt_that_is_too_long_is_refused_with_its_row_and_the_key(rows: Path) -> None:
    with rows.open("a") as file:
        file.write(json.dumps({"question": "x" * 700, "answer": "1"}) + "\n")
    message = refused(DataError, f"data.path={rows}")
    assert "line 21" in message
    assert "data.max_prompt_tokens" in message
    check(f"data.path={rows}", "data.too_long=skip")


def test_an_unknown_reward_is_refused_with_the_nearest(rows: Path) -> None:
    assert "'digits'" in refused(ConfigError, f"data.path={rows}", "reward.function=digit")


def test_the_parameters_of_a_fresh_model_are_counted_as_torch_counts_them(model: Path) -> None:
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as file:
        counted = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - no mapping
    assert fresh_shape(SMALL).num_parameters == counted
    assert "3.0M" in check_model(load_config(["model=tiny"]))


def test_the_parameters_of_a_fresh_mixture_are_counted_as_torch_counts_them() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    mixture = replace(SMALL, num_experts=3)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(model_config(mixture, vocabulary_size(mixture)))
    assert fresh_shape(mixture).num_parameters == sum(parameter.numel() for parameter in lm.parameters())
    assert "Qwen3-MoE with 3 experts" in check_model(load_config(["model=tiny", "model.fresh.num_experts=3"]))


def test_the_parameters_of_a_fresh_model_that_sees_are_counted() -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    seeing = replace(SMALL, num_vision_layers=2, vision_hidden_size=96)
    with torch.device("meta"):
        lm = AutoModelForImageTextToText.from_config(model_config(seeing, vocabulary_size(seeing)))
    assert fresh_shape(seeing).num_parameters == sum(parameter.numel() for parameter in lm.parameters())
    assert "Qwen2.5-VL" in check_model(load_config(["model=tiny", "model.fresh.num_vision_layers=1"]))


def test_pictures_for_a_model_of_text_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_pictures: the fresh model is one of text\. Set model\.fresh\.num"):
        processor_of(load_config(["model=tiny"]))
    with pytest.raises(ConfigError, match="model_type=qwen2 is a model of text"):
        processor_of(load_config([f"model.path={model}"]))


def test_policies_that_are_whole_models_have_one_tokenizer(model: Path, tmp_path: Path) -> None:
    config = load_config([f"model.path={model}", "rollout.max_model_len=256", "rollout.sampling.max_tokens=64"])
    config.trainer.policies = {"solver": PolicyConfig(), "proposer": PolicyConfig()}
    assert check_own_models(config) == "solver from model.path, proposer from model.path"
    config.model.paths["proposer"] = str(tmp_path)
    with pytest.raises(ModelError, match=r"model\.paths\.proposer"):
        check_own_models(config)
    build_fresh_model(tmp_path, replace(SMALL, words=["word"]), seed=1)
    with pytest.raises(ConfigError, match=r"model\.paths\.proposer=.* is not that of model\.path"):
        check_own_models(config)
    build_fresh_model(config.model.paths["proposer"], SMALL, seed=2)
    assert check_own_models(config) == f"solver from model.path, proposer from {tmp_path}"


def test_experts_of_a_dense_model_are_not_replayed(model: Path) -> None:
    words = ["rollout.router_replay=true", "rollout.engine=hf"]
    for dense in ("model=tiny", f"model.path={model}"):
        with pytest.raises(ConfigError, match=r"rollout\.router_replay=true: .* is no mixture of experts"):
            check_model(load_config([dense, *words]))
    assert "3 experts" in check_model(load_config(["model=tiny", "model.fresh.num_experts=3", *words]))


def test_the_transport_of_weights_is_told_and_one_that_cannot_work_refused(rows: Path) -> None:
    config = load_config([f"data.path={rows}"])
    flow = build_dataflow(config.algorithm)
    found = {check.name: check for check in checks(resolved(config, flow))}
    assert found["weights"].look().startswith("shm: through shared memory, and from node to node by their agents")
    assert "weights.transport=nccl" in refused(ConfigError, f"data.path={rows}", "weights.transport=nccl")


def test_a_state_that_no_checkpoint_can_keep_is_refused_if_any_are_taken(rows: Path) -> None:
    words = ["model=tiny", f"data.path={rows}"]
    flow = Dataflow().rollout(samples_per_prompt=2).reward()
    flow.compute(len, per="batch", reads=["reward"], writes=["advantage"], name="mine", state={"seen": {1}})
    flow.train(loss=policy_loss)
    for every, found in ((50, {"states"}), (0, set())):
        config = load_config([*words, f"checkpoint.every_steps={every}"])
        states = [check for check in checks(resolved(config, flow)) if check.name == "states"]
        assert {check.name for check in states} == found
        for check_ in states:
            with pytest.raises(DataflowError, match=r"stage 'mine': of its state, \['seen'\] is of type set"):
                check_.look()


@pytest.mark.parametrize(("url", "answer"), [("memory://runs", "memory://runs answers: 0 runs"), ("nope://runs", None)])
def test_a_url_for_runs_is_asked_whether_it_answers(model: Path, rows: Path, url: str, answer: str | None) -> None:
    config = load_config([f"model.path={model}", f"data.path={rows}", f"output_dir={url}"])
    flow = build_dataflow(config.algorithm)
    (check,) = [check for check in checks(resolved(config, flow)) if check.name == "output_dir"]
    if answer is not None:
        assert check.look().startswith(answer)
    else:
        with pytest.raises(CheckpointError, match=r"nope://runs: no file system for it .*output_dir"):
            check.look()


@pytest.mark.real
def test_the_fence_of_code_is_tried_where_it_is_to_hold(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["reward.function=python_tests", f"data.path={rows}"]
    told: list[str] = []
    config = load_config(words)
    flow = build_dataflow(config.algorithm)
    check_run(resolved(config, flow), told.append)
    (said,) = told
    assert said.startswith("sandbox: tried from inside, and no hole found; ")
    assert "control group" in said, "which limits hold here"

    def none() -> Path:
        raise SandboxUnavailable("there is no bwrap")

    monkeypatch.setattr("penstock.workers.sandbox.fence.find_bwrap", none)
    assert "there is no bwrap" in refused(SandboxUnavailable, *words)
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")  # it is to hold on that cluster's nodes
    config = load_config(words)
    flow = build_dataflow(config.algorithm)
    (found,) = [one for one in checks(resolved(config, flow)) if one.name == "sandbox"]
    assert (found.look(), found.is_reported) == ("tried on the cluster's nodes when the run starts", False)


@pytest.mark.real
def test_the_fence_of_code_is_tried_with_the_limits_that_it_will_have(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workers.sandbox.cgroup.own_group", lambda controller: None)
    words = ["reward.function=python_tests", f"data.path={rows}"]
    required = refused(SandboxUnavailable, *words, "reward.options.limits.require_cgroup=true")
    assert "sandbox.require_cgroup=true: there is no control group" in required
    message = refused(ConfigError, *words, "reward.options.limits.memory=5")
    assert "reward.options.limits.memory: the sandbox has no such limit" in message
    config = load_config([*words, "reward.options.limits.cpu_s=2", "environment.options.tools=[python]"])
    assert limits_of_code(config) == [Limits(cpu_s=2), Limits()]
    assert limits_of_code(load_config(["environment.sandbox.require_cgroup=true"])) == [Limits(require_cgroup=True)]
    assert limits_of_code(load_config(["reward.function=math_verify"])) == []
    assert limits_of_code(load_config(["environment.name=repository"])) == [LIMITS]
    both = load_config(["environment.name=repository", "environment.sandbox.require_cgroup=true"])
    assert limits_of_code(both) == [Limits(require_cgroup=True), replace(LIMITS, require_cgroup=True)]


def test_how_calls_of_tools_are_read_is_told_at_the_start(model: Path, rows: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats"
    shutil.copytree(model, chats)
    (chats / "chat_template.jinja").write_text(trl_template("qwen3_5_think"))
    tools = ["environment.name=tools", f"data.path={rows}", *LENGTHS]

    def told(*words: str) -> list[str]:
        said: list[str] = []
        config = load_config([*tools, *words])
        flow = dataflow_of(config)
        check_run(resolved(config, flow), said.append)
        return [text for text in said if text.startswith("tool calls")]

    assert told(f"model.path={chats}") == ["tool calls: calls are read as qwen3_coder"]
    with pytest.raises(ConfigError, match="chat template leaves out the tools and their calls"):
        told(f"model.path={model}")
    with pytest.raises(ConfigError, match=r"environment\.gateway\.tools=hermes: .* writes calls as qwen3_coder"):
        told(f"model.path={chats}", "environment.gateway.tools=hermes")
    (left_out,) = told(f"model.path={model}", "environment.gateway.tools=pythonic")
    assert left_out.startswith("tool calls: calls are read as pythonic; the model's chat template leaves out the tools")


def test_a_place_that_cannot_be_made_is_told_before_anything_starts(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"data.path={rows}", "reward.function=digits"]
    (tmp_path / "a_file").write_text("")
    said = refused(ConfigError, *words, f"output_dir={tmp_path}/a_file/runs")
    assert said == f"output_dir: cannot make {tmp_path}/a_file/runs (Not a directory). " + WRITABLE
    check(*words, f"output_dir={tmp_path}/new/runs")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/a_file")
    said = refused(ConfigError, *words, f"output_dir=file://{tmp_path}/bucket")
    assert said.startswith(f"XDG_CACHE_HOME: cannot make {tmp_path}/a_file/penstock/runs/")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a_file", "rows.jsonl"]


WRITABLE = "Set output_dir to a place that can be written."


def test_a_judge_of_the_run_is_looked_at_before_it_starts(rows: Path, tmp_path: Path) -> None:
    words = ["reward.function=judge", f"data.path={rows}"]
    check(*words)
    assert "it cannot be held to a JSON schema" in refused(ConfigError, *words, "reward.judge.engine=hf")
    assert "nothing-here" in refused(ModelError, *words, f"+model.paths.judge={tmp_path}/nothing-here")


def test_a_template_that_writes_answered_conversations_otherwise_is_told(model: Path, tmp_path: Path) -> None:
    file, thinks, told = tmp_path / "rows.jsonl", tmp_path / "thinks", list[str]()
    file.write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    shutil.copytree(model, thinks)
    (thinks / "chat_template.jinja").write_text(trl_template("deepseek_r1_distill"))
    words = ["recipe=arithmetic", "algorithm=sft", "data.source=auto", "data.chat_template=true", f"data.path={file}"]
    for path in (model, thinks):
        config = load_config([*words, f"model.path={path}", "rollout.max_model_len=256"])
        flow = build_dataflow(config.algorithm)
        found = {check.name: check for check in checks(resolved(config, flow))}
        told.append(found["rewritten turns"].look())
    assert told[0] == ""
    assert "begins an answered conversation with another text than the prompt" in told[1]


def test_a_loss_that_depends_on_how_batches_are_cut_is_refused(rows: Path) -> None:
    words = ["recipe=arithmetic", "warm_start.recipe=null", "evaluation.every_steps=0", f"data.path={rows}"]
    config = load_config([*words, "reward.function=digits", "reward.options={}", "rollout.engine=hf"])
    flow = Dataflow().rollout(samples_per_prompt=2)
    loss = flow.train(loss=lambda logprobs: logprobs.mean())
    with pytest.raises(DataflowError, match=r"for a batch, .* for its two halves together"):
        check_run(resolved(config, loss.check()))
