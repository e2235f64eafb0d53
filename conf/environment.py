"""An environment, in which tasks are done, its limits, and those of the code that a model wrote."""

from dataclasses import dataclass, field
from typing import Any

from penstock.conf.checks import POSITIVE, check_bounds, one_of, within

OLD_TURNS = ("refuse", "context")
SAMPLING = ("run", "client")
TOOL_FORMATS = (
    "auto", "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder", "glm45", "muse_glimmer", "deepseek_v3",
    "gemma4", "lfm2", "openai", "none",
)  # fmt: skip


@dataclass
class GatewayConfig:
    """The endpoint at which agents reach the policy, and how conversations become tokens."""

    host: str = "127.0.0.1"
    """Interface that the HTTP server listens at. Loopback: agents outside of this machine do not reach it. 0.0.0.0 or
    :: is every interface, for agents and sandboxes elsewhere; each attempt has a key of its own, but nothing is
    encrypted."""
    address: str | None = None
    """Host in the address that agents get, where they know this node by another name, such as that of a proxy, which
    keeps the port. `null`: host, or where that is every interface the address at which other nodes reach this one."""
    port: int = 0
    """Port of the first environment actor; each further actor has the next one. 0: any free port; agents get it with
    the address."""
    format: str = "template"
    """Format of conversations: template (the tokenizer's own chat template), or the name of a family that the package
    `renderers` knows, such as qwen3, which reads tool calls as well."""
    sampling: str = "run"
    """Side whose temperature, top_p, top_k and min_p count where a client over HTTP sends some. run: those of
    rollout.sampling; others are ignored and counted (environment/ignored_temperature, …), as clients send their own
    defaults. client: the client's; the trainer computes log-probabilities at the temperature of each turn. Evaluation's
    greedy attempts are greedy in both."""
    tools: str = "auto"
    """Format of the model's tool calls, with format=template. auto: the one that reads back a call that the model's
    chat template has written; the run says which when it starts, and refuses tools where there is none. Name one for a
    model that was trained to write calls which its template leaves out: hermes, llama3_json, mistral, pythonic,
    qwen3_coder, glm45, muse_glimmer, deepseek_v3, gemma4, lfm2, openai (gpt-oss). none: no calls are read."""

    def __post_init__(self) -> None:
        one_of("environment.gateway.sampling", self.sampling, SAMPLING)
        one_of("environment.gateway.tools", self.tools, TOOL_FORMATS)
        within("environment.gateway.port", self.port, 0, 65535)


@dataclass
class SandboxConfig:
    """Limits of the code that a model wrote: what it may use up before it is ended, and how much of it runs at once."""

    cpu_s: float = 5.0
    """Processor time of one execution, of all its processes together, in seconds. 5: far more than tests of small
    programs need, and little enough that endless loops do not fill the cores. Each process alone is ended by the kernel
    after so many seconds, rounded up."""
    wall_s: float = 10.0
    """Time of one execution by the clock, in seconds. Twice cpu_s: machines are shared, and a sleep costs no CPU."""
    memory_mib: int = 512
    """Memory of one execution in MiB: address space of each process, and what all use together with /tmp. Python itself
    takes 30. Enough for tables of dynamic programming, and a hundred executions fit a server."""
    num_processes: int = 32
    """Processes and threads at once. Enough for a small thread pool; a fork bomb ends here."""
    file_mib: int = 16
    """Size of one file in MiB, and so of what is kept of an output before it is cut."""
    tmp_mib: int = 64
    """Size of the private /tmp in MiB. It is in memory, and counts as such where there is a cgroup."""
    tmp_files: int = 4096
    """Files and directories in /tmp."""
    output_mib: float = 1.0
    """Most that an execution may return, in MiB: standard output, standard error and results, each. More is a failure,
    as no honest answer to a test is so long."""
    require_cgroup: bool = False
    """True: refuse to run code where no control group holds its memory and counts its processor time. false: there they
    are looked at 20 times a second, and more may be used between two looks; the run says so when it starts."""
    num_workers: int = 1
    """Number of executions at once. Each worker keeps an interpreter ready inside its fence (about 15 MiB)."""

    def __post_init__(self) -> None:
        check_bounds(
            self, "sandbox",
            memory_mib=64, num_processes=1, file_mib=1, tmp_mib=1, tmp_files=16, num_workers=1, cpu_s=POSITIVE,
            wall_s=POSITIVE, output_mib=POSITIVE,
        )  # fmt: skip


@dataclass
class EnvironmentConfig:
    name: str | None = None
    """Class of the environment: a registered name (gymnasium, textarena, reasoning_gym, tools, mcp, …), `file.py:Class`
    or `package.module:Class`. `null`: no environment, a prompt has one response."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    num_workers: int = 1
    """Environment actors, each with its share of the attempts and an endpoint of its own."""
    cpus_per_worker: float = 0.0
    """Logical CPUs that each reserves. 0: none, as most of an environment is waiting for tokens."""
    max_attempts: int = 1024
    """Most attempts that one actor has under way, those of evaluation included. Fewer are while vLLM's KV memory has no
    room for them until they end, by the lengths of recent ones. 1024: as many as one event loop holds with ease."""
    max_turns: int = 32
    """Turns after which an attempt is truncated."""
    max_tokens: int = 8192
    """Sampled tokens of an attempt; then it is truncated."""
    timeout_s: float = 600.0
    """Wall time of an attempt; then it is truncated, or failed if nothing was sampled. Bounds how long one that hangs
    holds up a batch. Waits for a free reward process or fence of the sandbox are not counted."""
    old_turns: str = "refuse"
    """Treatment of attempts that outlast max_staleness. refuse: admission sees to it that there are none; the store's
    window is bounded by max_staleness. context: any store.window may let others overtake long attempts; their turns
    that are too old by then are read and not trained, and an attempt of which no turn is young enough is dropped
    (dropped/stale)."""
    tool_timeout_s: float = 30.0
    """Deadline of one tool call, from its start (waiting for a free fence of the sandbox is not counted); then the
    model reads that it timed out, and the attempt continues."""
    tool_threads: int = 32
    """Calls of plain functions that run at a time, each in a thread, so that a slow one blocks no other. A call that
    times out gives its place to the next."""
    max_tool_characters: int = 16_384
    """Most characters of a tool's result. The rest is cut, and a note says so to the model."""
    retries: int = 2
    """Times that an attempt is played again from its start, by the same seed, after `setup` raised or anything raised
    `InfrastructureError`, with pauses of 1, 2, 4, … s. 2: a container or service that fails once seldom fails thrice,
    and one that is down should be told soon. Each try has all of timeout_s."""
    max_error_share: float = 0.2
    """Share of the last 100 attempts that may fail; the run ends when more do."""
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """Limits of `ctx.sandbox()` and of the tool python: what code that the model wrote may use."""
    workspace_disk: str | None = None
    """Directory of each node below which workspaces keep what is changed in them, unless `ctx.workspace(disk=…)` names
    one. null: it stays in memory, which is faster, and holds the limits exactly."""

    def __post_init__(self) -> None:
        one_of("environment.old_turns", self.old_turns, OLD_TURNS)
        check_bounds(
            self, "environment",
            num_workers=1, max_attempts=1, max_turns=1, max_tokens=1, tool_threads=1, max_tool_characters=1,
            cpus_per_worker=0, retries=0, timeout_s=POSITIVE, tool_timeout_s=POSITIVE, max_error_share=(0, 1),
        )  # fmt: skip
