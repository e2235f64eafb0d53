"""Whole runs on a local Ray: engines, staleness, ranks, a reference, bad rewards, Ctrl-C, jobs."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from penstock.conf.errors import RewardFailure
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run import run
from penstock.orchestrator.run_directory.json_lines import read_lines
from penstock.workers.fresh_model import build_fresh_model
from tests.model_files import load_model
from tests.orchestrator.conftest import SMALL_MODEL
from tests.run_files import metrics_of, sampled_difference, samples_of

pytestmark = pytest.mark.real
PATIENCE_S = 900.0
"""Deadline of what happens soon unless something is wrong. Tests say nothing of how soon."""


@pytest.mark.promise("1", "Samples get too old")
@pytest.mark.real
@pytest.mark.pngs
def test_an_asynchronous_run_with_vllm_keeps_its_staleness_bound_and_its_files(small_run, tmp_path, cluster):
    words = [*small_run, "rollout.engine=vllm", "max_staleness=1", "trainer.max_steps=5", "name=async"]
    words += ["rollout.num_threads=0", "trainer.num_threads=0"]  # as many as a trial finds
    words += ["store.inline_bytes=100", "store.shared_memory_mib=1", f"store.spill_dir={tmp_path}/disk"]
    result = run(load_config([*words, f"output_dir={tmp_path}"]), quiet=True)
    steps = metrics_of(result.directory)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert all(line["staleness/max"] <= 1 for line in steps)
    assert any(line["staleness/max"] == 1 for line in steps), "nothing overlapped"
    assert steps[0]["mismatch/logprob_abs_mean"] < 1e-4
    looks = [key for line in steps for key in line if key.startswith(("probe/scores/", "probe/samples/"))]
    assert "probe/scores/Rollout-0" in looks or any("probe/unanswered" in line for line in steps)
    assert all(value < 1e-4 for line in steps for key, value in line.items() if key in looks)
    for name in ("config.yaml", "events.jsonl", "timeline.json", "report.html", "model/model.safetensors"):
        assert (result.directory / name).stat().st_size > 0
    check_told(result.directory, {"Rollout-0", "Reward-0", "Trainer-policy-0"})
    for trial in json.loads((result.directory / "threads.json").read_text()):
        assert all(seconds > 0 for role in ("rollout", "trainer") for seconds in trial["s_per_token"][role].values())
    assert list((result.directory / "samples").glob("step_*.parquet"))
    assert list((result.directory / "plots").glob("*.png"))
    assert not list(Path("/dev/shm").glob("penstock-async-*")), "weights left in shared memory"
    assert not list((tmp_path / "disk").iterdir()), "what the store had moved to disk is left"


@pytest.mark.real
def test_a_run_with_drafted_tokens_trains_on_the_models_log_probabilities(small_run, tmp_path, cluster):
    model = next(word.removeprefix("model.path=") for word in small_run if word.startswith("model.path="))
    words = [*small_run, "rollout.engine=vllm", "rollout.speculation.method=draft", f"model.paths.draft={model}"]
    words += ["max_staleness=1", "trainer.max_steps=3", "name=drafts", f"output_dir={tmp_path}"]
    steps = metrics_of(run(load_config(words), quiet=True).directory)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["mismatch/logprob_abs_mean"] < 1e-4 for line in steps if "mismatch/logprob_abs_mean" in line)
    assert 0 < steps[0]["rollout/speculation_acceptance"] < 0.5, "likeliest tokens, of a model that knows nothing"


def check_told(directory, members):
    """Each step's line says who did what, and its path leads from its start to its end. The state knows everybody."""
    for line, step in zip(read_lines(directory / "spans.jsonl"), metrics_of(directory), strict=True):
        assert line["step"] == step["step"]
        assert line["text"].startswith(f"step {line['step']} took ")
        assert line["missed"] == 0
        assert members <= line["lanes"].keys()
        assert {"wait for batch", "update"} <= {name for name, *_ in line["lanes"]["Trainer-policy-0"]}
        at = 0
        for _, _, start, end in line["path"]:
            assert abs(start - at) <= 10, line["path"]  # milliseconds: shorter segments are left out
            at = end
        assert abs(at - 1000 * (line["end"] - line["start"])) <= 10
    state = json.loads((directory / "state.json").read_text())
    assert members | {"Store", "Prompts"} <= {member["name"] for member in state["members"]}
    assert state["store"] is None or set(state["store"]["rows"]) >= {"rollout", "reward", "train"}


@pytest.mark.promise("What is supported")
def test_two_ranks_with_a_reference_train_and_report_kl(small_run, tmp_path, cluster):
    words = [*small_run, "rollout.engine=hf", "trainer.num_ranks=2", "algorithm.kl_coef=0.1", "trainer.max_steps=3"]
    result = run(load_config([*words, "trainer.num_threads=1", "name=kl", f"output_dir={tmp_path}"]), quiet=True)
    steps = metrics_of(result.directory)
    assert abs(steps[0]["actor/kl"]) < 1e-6
    assert steps[-1]["actor/kl"] > 0
    assert "timing_s/reference" in steps[-1]
    check_tokens(result.directory, steps, (1, 3))


def test_each_teacher_scores_the_rows_of_its_part(small_run, tmp_path, cluster):
    """Of one part the teacher is the policy as it begins: nothing is learned from it at the first step."""
    build_fresh_model(tmp_path / "teacher", SMALL_MODEL, seed=4)
    model, data = (next(word for word in small_run if word.startswith(key)) for key in ("model.path=", "data.path="))
    words = [*small_run, "rollout.engine=hf", "trainer.max_steps=1", "algorithm=distill", f"output_dir={tmp_path}"]
    words += ["algorithm.candidates=4", "algorithm.group_size=2"]
    words += ["algorithm.teachers={a: same, b: another}"]
    words += [f"model.paths.same={model.partition('=')[2]}", f"model.paths.another={tmp_path}/teacher"]
    norms = []
    for weight in (1, 1000):
        parts = f"a: {{path: {data.partition('=')[2]}, weight: {weight}}}, b: {{path: {data.partition('=')[2]}}}"
        mixture = ["data.mixture={" + parts + "}", "data.shuffle=false"]
        result = run(load_config([*words, *mixture, f"name=of{weight}"]), quiet=True)
        norms.append(metrics_of(result.directory)[0]["actor/grad_norm"])
    assert norms[1] < 1e-4 < norms[0]


def check_tokens(directory, lines, steps):
    """What the samples of these steps say of each token is what the steps' metrics are made of."""
    for step in steps:
        measured = lines[step - 1]["mismatch/logprob_abs_mean"]
        assert sampled_difference(directory, step) == pytest.approx(measured, rel=1e-3)
        assert all(len(row["loss_mask"]) == len(row["response_ids"]) for row in samples_of(directory, step))


@pytest.mark.promise("What is supported")
def test_two_deepspeed_ranks_train_against_a_reference_and_publish_the_model(small_run, tmp_path, cluster):
    words = [*small_run, "rollout.engine=hf", "trainer.engine=deepspeed", "trainer.deepspeed.zero_stage=3"]
    words += ["trainer.num_ranks=2", "trainer.num_threads=1", "algorithm.kl_coef=0.1", "trainer.max_steps=3"]
    result = run(load_config([*words, "name=zero", f"output_dir={tmp_path}"]), quiet=True)
    steps = metrics_of(result.directory)
    assert abs(steps[0]["actor/kl"]) < 1e-6
    assert steps[-1]["actor/kl"] > 0
    assert all(line["mismatch/logprob_abs_mean"] < 1e-4 for line in steps)
    check_tokens(result.directory, steps, (1, 3))
    assert load_model(result.model).keys() == load_model(small_run[0].partition("=")[2]).keys()


REWARDS = """
import time
calls = 0
def sometimes(response, task):
    global calls
    calls += 1
    if calls % 10 == 3:
        raise ValueError("no opinion")
    return float(len(response))
def never(response, task):
    print("nothing is good enough", flush=True)
    raise RuntimeError("broken on purpose")
"""


@pytest.mark.promise("6", "8")
def test_a_reward_that_sometimes_fails_costs_its_samples_only(small_run, tmp_path, cluster):
    (tmp_path / "rewards.py").write_text(REWARDS)
    words = [*small_run, "rollout.engine=hf", "trainer.max_steps=3", f"output_dir={tmp_path}", "name=some"]
    result = run(load_config([*words, f"reward.function={tmp_path}/rewards.py:sometimes"]), quiet=True)
    assert metrics_of(result.directory)[-1]["dropped/reward_error"] >= 2


def test_a_reward_that_always_fails_ends_the_run_with_its_message(small_run, tmp_path, cluster):
    (tmp_path / "rewards.py").write_text(REWARDS)
    words = [*small_run, "rollout.engine=hf", "trainer.max_steps=3", f"output_dir={tmp_path}", "name=none"]
    with pytest.raises(RewardFailure, match="broken on purpose"):
        run(load_config([*words, f"reward.function={tmp_path}/rewards.py:never"]), quiet=True)
    events = [json.loads(line)["kind"] for line in (tmp_path / "none" / "events.jsonl").read_text().splitlines()]
    assert events[-1] == "failed"
    assert "out nothing is good enough" in (tmp_path / "none" / "logs" / "Reward-0.log").read_text()


def test_the_fences_of_code_are_tried_on_the_nodes_of_a_cluster_that_was_there(small_run, tmp_path, cluster, capsys):
    tests = [{"stdin": "", "stdout": "1"}]
    rows = [json.dumps({"question": f"print {i}", "tests": tests}) for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    words = [*small_run, "rollout.engine=hf", "trainer.max_steps=1", f"output_dir={tmp_path}", "name=code"]
    words += [f"data.path={tmp_path}/rows.jsonl", "data.columns.answer=null", "reward.function=python_tests"]
    run(load_config(words))
    said = " ".join(capsys.readouterr().out.split())
    assert f"sandbox on {socket.gethostname()}: tried from inside, and no hole found; " in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_leave_no_process_and_a_valid_run_directory(small_run, tmp_path, warm_python, number):
    """As users see them, and as schedulers do, for which a warm start will do, and which give it time for a checkpoint.
    Ray has a handler of SIGTERM too."""
    words = [*small_run, "rollout.engine=hf", "trainer.max_steps=100000", f"output_dir={tmp_path}", "name=stopped"]
    words += ["checkpoint.every_steps=100000", f"faults.preemption_s={PATIENCE_S}"]
    python = [sys.executable] if number == signal.SIGINT else warm_python
    command = [*python, "-m", "penstock.cli.main", "run", *words]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    file = tmp_path / "stopped" / "metrics.jsonl"
    try:
        deadline = time.monotonic() + PATIENCE_S
        while process.poll() is None and not (file.exists() and file.stat().st_size):
            assert time.monotonic() < deadline, "no step was taken"
            time.sleep(0.2)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130, output[-2000:]
        _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
        assert not alive
    finally:
        _end_tree(process)
    assert len(metrics_of(file.parent)) >= 1
    events = [json.loads(line)["kind"] for line in (file.parent / "events.jsonl").read_text().splitlines()]
    assert events[-1] == "interrupted"
    assert ("preempted" in events) == (number == signal.SIGTERM)
    saved = [path.parent.name for path in file.parent.glob("checkpoints/*/COMPLETE")]
    last = metrics_of(file.parent)[-1]["step"]
    assert saved == ([f"global_step_{last}"] if number == signal.SIGTERM else [])
    assert (file.parent / "report.html").exists()
    assert not list(Path("/dev/shm").glob("penstock-stopped-*"))


@pytest.mark.promise("What is supported")
def test_ray_job_submit_runs_a_recipe_on_a_cluster_that_is_there(small_run, tmp_path, ray_directory, warm_python):
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "RAY_worker_niceness": "0"}
    environment.pop("RAY_ADDRESS", None)
    # Ray asks for a token wherever somebody has once made one, but its own `job submit` does not look for it then.
    environment["RAY_AUTH_MODE"] = "disabled"
    start = ["ray", "start", "--head", "--block", "--num-cpus=4", "--port=26379", "--dashboard-port=28265",
             "--dashboard-agent-listen-port=0"]  # fmt: skip
    start.append(f"--temp-dir={ray_directory}")
    head = subprocess.Popen(start, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        submit = ["ray", "job", "submit", "--address", "http://127.0.0.1:28265"]
        submit += ["--runtime-env-json", json.dumps({"py_executable": warm_python[0]})]
        submit += ["--", str(scripts / "penstock"), "run"]
        words = [*small_run, "rollout.engine=hf", "trainer.max_steps=2", f"output_dir={tmp_path}", "name=job"]
        _wait_for_port(28265, timeout_s=90)
        done = _submitted([*submit, *words], environment, timeout_s=60)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
        assert len(metrics_of(tmp_path / "job")) == 2
    finally:
        _end_tree(head)


@pytest.fixture
def ray_directory():
    """A place for the cluster's sockets, and for the note by which clients find it. Sockets need short paths."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        yield directory


def _submitted(command, environment, timeout_s):
    """Ray listens before the agent that takes jobs is there, and says then that one should try again later."""
    deadline = time.monotonic() + timeout_s
    while True:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        if "No available agent" not in done.stderr + done.stdout or time.monotonic() > deadline:
            return done
        time.sleep(1)


def _wait_for_port(port, timeout_s):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise AssertionError(f"nothing listens on port {port}")


def _end_tree(process):
    """End a process and all that it started, by id, unless it has ended."""
    if process.poll() is not None:
        return
    tree = [process, *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    _, alive = psutil.wait_procs(tree[1:], timeout=900)
    for child in alive:
        child.kill()
    process.wait(30)
