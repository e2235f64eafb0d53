"""Every metric that is declared. `METRICS` has all of them, by the role of the process that measures.

Workers measure them, `ui/grafana/` queries them, and a test compares docs/monitoring.md with
them. Prometheus keeps each series for weeks: one engine has 12 at most, a rank 12, a run 60 besides its ranks, and a
server 26 for each tenant.
"""

from penstock.metering.meters import COUNTER, GAUGE, SUMMARY, Metric

ON_VLLM, ON_GPU, IN_ENVIRONMENTS = "engine vllm", "GPU whose peak is known", "runs with an environment"
ON_SERVER = "penstock serve"
ON_DROPS, ON_ERRORS, ON_LOSSES = "rows that were dropped", "rewards that failed", "members that were lost"
BESIDE = ("open", "prepare", "verify", "stage")
"""Phases of a load during which vLLM samples."""

# fmt: off
# Engines

ROLLOUT_TOKENS = Metric("penstock_rollout_tokens_total", COUNTER, "tokens",
    "Tokens sampled, by time: also those of responses that are dropped later.")
ROLLOUT_SAMPLES = Metric("penstock_rollout_samples_total", COUNTER, "samples", "Responses completed.")
ROLLOUT_BUSY = Metric("penstock_rollout_busy_seconds_total", COUNTER, "seconds",
    "Time with at least one request. Its rate is the share of time that the engine works.")
ROLLOUT_RUNNING = Metric("penstock_rollout_running_sequences", GAUGE, "sequences", "Sequences that the engine decodes.")
ROLLOUT_WAITING = Metric("penstock_rollout_waiting_sequences", GAUGE, "sequences",
    "Sequences that wait for room in the engine; 0 for engines that have no queue.")
ROLLOUT_KV_CACHE = Metric("penstock_rollout_kv_cache_usage_ratio", GAUGE, "ratio",
    "Share of the KV cache's blocks that are in use.", condition=ON_VLLM)
ROLLOUT_PREFIX_LOOKUPS = Metric("penstock_rollout_prefix_lookup_tokens_total", COUNTER, "tokens",
    "Prompt tokens looked up in the prefix cache.", condition=ON_VLLM)
ROLLOUT_PREFIX_HITS = Metric("penstock_rollout_prefix_hit_tokens_total", COUNTER, "tokens",
    "Prompt tokens found there.", condition=ON_VLLM)
ROLLOUT_LOAD = Metric("penstock_rollout_weight_load_seconds", SUMMARY, "seconds",
    "One version of the weights, from the call until it is served.")
ROLLOUT_LOAD_PHASES = Metric("penstock_rollout_weight_load_phase_seconds_total", COUNTER, "seconds",
    "The same by phase: beside (the engine samples), paused (it does not).", labels=("phase",), condition=ON_VLLM)

# Ranks of the trainer

TRAINER_STEPS = Metric("penstock_trainer_steps_total", COUNTER, "steps", "Steps that the rank has made.")
TRAINER_SAMPLES = Metric("penstock_trainer_samples_total", COUNTER, "samples",
    "Rows trained by the ranks that speak for them: each row once.")
TRAINER_TOKENS = Metric("penstock_trainer_tokens_total", COUNTER, "tokens", "Response tokens of these rows.")
TRAINER_PHASES = Metric("penstock_trainer_step_phase_seconds_total", COUNTER, "seconds",
    "Parts of all steps: wait (for the batch), forward, backward, optimizer, other.", labels=("phase",))
TRAINER_LAST_STEP = Metric("penstock_trainer_last_step_timestamp_seconds", GAUGE, "seconds",
    "When the rank ended its last step, or was started. Unix time.")
TRAINER_FLOPS = Metric("penstock_trainer_flops_per_second", GAUGE, "FLOP/s",
    "Model FLOPs of the last step by its time of training, without recomputation.")
TRAINER_MFU = Metric("penstock_trainer_mfu_ratio", GAUGE, "ratio",
    "The same as a share of the device's peak (dense bf16).", condition=ON_GPU)
TRAINER_MEMORY = Metric("penstock_trainer_peak_memory_bytes", GAUGE, "bytes",
    "Most memory that the rank has had: of the GPU where it has one, else of its process.")

# The store

STORE_ROWS = Metric("penstock_store_rows", GAUGE, "rows",
    "Rows that a stage has before it, by state: free (for a worker), leased (by one).", labels=("stage", "state"))
STORE_ADMITTED = Metric("penstock_store_admitted_rows_total", COUNTER, "rows", "Rows admitted.")
STORE_BYTES = Metric("penstock_store_bytes", GAUGE, "bytes", "Bytes of values that are there.")
STORE_CAPACITY = Metric("penstock_store_capacity_bytes", GAUGE, "bytes", "What may be there: store.max_bytes.")
STORE_LEASES = Metric("penstock_store_leases", GAUGE, "leases", "Leases that are held.")
STORE_LEASE_WAIT = Metric("penstock_store_lease_wait_seconds_total", COUNTER, "seconds",
    "From requests of leases until they were given. Its rate is the mean number of workers that wait.",
    labels=("stage",))
STORE_STALENESS = Metric("penstock_store_staleness_versions", SUMMARY, "versions",
    "Staleness of the oldest token of each row, when its batch was formed.")
STORE_DROPPED = Metric("penstock_store_dropped_rows_total", COUNTER, "rows",
    "Rows that ended untrained, by reason.", labels=("reason",), condition=ON_DROPS)
STORE_SEEN = Metric("penstock_store_seen_timestamp_seconds", GAUGE, "seconds",
    "When the store said so last. Unix time: the run goes on as long as it is young.")

# Rewards

REWARD_SAMPLES = Metric("penstock_reward_samples_total", COUNTER, "samples", "Samples that have a reward.")
REWARD_LATENCY = Metric("penstock_reward_latency_seconds", SUMMARY, "seconds",
    "From the lease of a sample until its result, errors included.")
REWARD_ERRORS = Metric("penstock_reward_errors_total", COUNTER, "samples",
    "Samples without a reward, by reason: raised, bad_value, timeout, crash.", labels=("reason",), condition=ON_ERRORS)

# Environments

ENVIRONMENT_ATTEMPTS = Metric("penstock_environment_attempts_total", COUNTER, "attempts",
    "Attempts that have ended: completed, truncated, rejected, failed.", labels=("outcome",), condition=IN_ENVIRONMENTS)
ENVIRONMENT_TURNS = Metric("penstock_environment_turns_total", COUNTER, "turns",
    "Turns of the attempts that have ended.", condition=IN_ENVIRONMENTS)
ENVIRONMENT_ATTEMPT = Metric("penstock_environment_attempt_seconds", SUMMARY, "seconds",
    "One attempt, from its task to its end.", condition=IN_ENVIRONMENTS)
ENVIRONMENT_UNDER_WAY = Metric("penstock_environment_attempts_under_way", GAUGE, "attempts",
    "Attempts under way.", condition=IN_ENVIRONMENTS)
ENVIRONMENT_LIMIT = Metric("penstock_environment_attempts_limit", GAUGE, "attempts",
    "Attempts that may be under way at once, by the engines' KV memory.", condition=IN_ENVIRONMENTS)

# The driver

RUN_LOST = Metric("penstock_run_members_lost_total", COUNTER, "members",
    "Members that died or hung, and restarts that failed, by their role.", labels=("member_role",), condition=ON_LOSSES)
RUN_REPLACED = Metric("penstock_run_members_replaced_total", COUNTER, "members",
    "Members whose place another one took, by their role.", labels=("member_role",), condition=ON_LOSSES)
STEP_MISMATCH = Metric("penstock_step_mismatch_logprob_abs_mean", GAUGE, "nats",
    "Mean difference between the trainer's and the engine's log-probability of a token, at the last step.",
    condition="dataflows with a rollout")

# The server of other people's loops

SERVE_REQUESTS = Metric("penstock_serve_requests_total", COUNTER, "requests",
    "Requests that were carried out, also those that failed.", labels=("tenant", "kind"), condition=ON_SERVER)
SERVE_FAILURES = Metric("penstock_serve_failures_total", COUNTER, "failures", "Those that failed.",
    labels=("tenant",), condition=ON_SERVER)
SERVE_REFUSED = Metric("penstock_serve_refused_requests_total", COUNTER, "requests",
    "Requests refused for now (429): too much of the tenant waits.", labels=("tenant",), condition=ON_SERVER)
SERVE_TRAINED = Metric("penstock_serve_tokens_trained_total", COUNTER, "tokens",
    "Tokens of forward passes, with and without gradients.", labels=("tenant",), condition=ON_SERVER)
SERVE_SAMPLED = Metric("penstock_serve_tokens_sampled_total", COUNTER, "tokens", "Tokens sampled.",
    labels=("tenant",), condition=ON_SERVER)
SERVE_RANKS = Metric("penstock_serve_seconds_trained_total", COUNTER, "seconds", "Seconds on the ranks.",
    labels=("tenant",), condition=ON_SERVER)
SERVE_ENGINES = Metric("penstock_serve_seconds_sampled_total", COUNTER, "seconds",
    "Seconds on engines; those of requests at the same time add up.", labels=("tenant",), condition=ON_SERVER)
SERVE_WAIT = Metric("penstock_serve_wait_seconds", SUMMARY, "seconds",
    "From the acceptance of a request, or the server's start, until ranks or engines begin with it.",
    labels=("tenant", "place"), condition=ON_SERVER)
SERVE_WAITING = Metric("penstock_serve_requests_waiting", GAUGE, "requests",
    "Requests without a result: they wait, or are under way.", labels=("tenant",), condition=ON_SERVER)
SERVE_WAITING_BYTES = Metric("penstock_serve_waiting_bytes", GAUGE, "bytes", "The bodies of these.",
    labels=("tenant",), condition=ON_SERVER)
SERVE_ADAPTERS = Metric("penstock_serve_adapters", GAUGE, "adapters", "Training clients that are open.",
    labels=("tenant",), condition=ON_SERVER)
SERVE_RESIDENT = Metric("penstock_serve_adapters_on_ranks", GAUGE, "adapters", "Those whose adapter the ranks have.",
    labels=("tenant",), condition=ON_SERVER)
SERVE_STORED = Metric("penstock_serve_stored_bytes", GAUGE, "bytes", "Saved weights on the server's disk.",
    labels=("tenant",), condition=ON_SERVER)

# fmt: on
METRICS: dict[str, tuple[Metric, ...]] = {}
"""Metrics by the role of the process that measures them, the first word of their names. The driver's are of the run or
of its last step."""
for _metric in [value for value in list(vars().values()) if isinstance(value, Metric)]:
    _word = _metric.name.split("_")[1]
    _role = "driver" if _word in ("run", "step") else _word
    METRICS[_role] = (*METRICS.get(_role, ()), _metric)
