"""Every metric that actors measure themselves. `METRICS` has all of them, by role.

Workers measure them, `orchestrator/observability/grafana/` queries them, and a test compares docs/monitoring.md with
them.
"""

from penstock.metering.meters import COUNTER, GAUGE, HISTOGRAM, Metric

SHORT_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Buckets of waits and rewards, in seconds."""
LONG_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Buckets of steps and weights, in seconds."""
VERSIONS = (0.5, 1.5, 2.5, 3.5, 4.5, 8.5, 16.5)
"""Buckets of staleness. Ray takes no bound of 0: what is not stale is below 0.5."""
ON_VLLM, ON_GPU, IN_ENVIRONMENTS = "engine vllm", "GPU whose peak is known", "runs with an environment"

DROP_REASONS = (
    "stale", "reward_error", "empty_response", "bad_logprobs", "invalid_prompt", "refused_request", "store_lost",
    "node_lost",
)  # fmt: skip
"""Reasons known before any row is dropped, so that their counts begin at 0. Filters and environments name more."""
REWARD_ERRORS_BY = ("raised", "bad_value", "timeout", "crash")
OUTCOMES = ("completed", "truncated", "rejected", "failed")
MEMBER_ROLES = ("rollout", "reward", "environment", "compute", "scorer", "trainer", "prompts", "store", "agent")

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
ROLLOUT_LOAD = Metric("penstock_rollout_weight_load_seconds", HISTOGRAM, "seconds",
    "One version of the weights, from the call until it is served.", buckets=LONG_S)
ROLLOUT_LOAD_PHASES = Metric("penstock_rollout_weight_load_phase_seconds_total", COUNTER, "seconds",
    "The same by phase. From pause to resume nothing is sampled.", labels=("phase",), condition=ON_VLLM)

# Ranks of the trainer

TRAINER_STEPS = Metric("penstock_trainer_steps_total", COUNTER, "steps", "Steps that the rank has made.")
TRAINER_SAMPLES = Metric("penstock_trainer_samples_total", COUNTER, "samples",
    "Rows trained by the ranks that speak for them: each row once.")
TRAINER_TOKENS = Metric("penstock_trainer_tokens_total", COUNTER, "tokens", "Response tokens of these rows.")
TRAINER_PHASES = Metric("penstock_trainer_step_phase_seconds", HISTOGRAM, "seconds",
    "Parts of a step: wait (for the batch), prepare, plan, forward, backward, optimizer, keep.",
    labels=("phase",), buckets=LONG_S)
TRAINER_LAST_STEP = Metric("penstock_trainer_last_step_timestamp_seconds", GAUGE, "seconds",
    "When the rank ended its last step, or was started. Unix time.")
TRAINER_FLOPS = Metric("penstock_trainer_flops_per_second", GAUGE, "FLOP/s",
    "Model FLOPs of the last step by its time of training, without recomputation.")
TRAINER_MFU = Metric("penstock_trainer_mfu_ratio", GAUGE, "ratio",
    "The same as a share of the device's peak (dense bf16).", condition=ON_GPU)
TRAINER_MEMORY = Metric("penstock_trainer_peak_memory_bytes", GAUGE, "bytes",
    "Most memory that the rank has had: of the GPU where it has one, else of its process.")
TRAINER_MISMATCH = Metric("penstock_trainer_mismatch_nats", GAUGE, "nats",
    "Mean difference between the trainer's and the engine's log-probability of a token, at the last step.",
    condition="dataflows with a rollout")

# The store

STORE_ROWS = Metric("penstock_store_rows", GAUGE, "rows",
    "Rows that are there, by stage and state: waiting (for columns), free, leased, done.", labels=("stage", "state"))
STORE_ADMITTED = Metric("penstock_store_admitted_rows_total", COUNTER, "rows", "Rows admitted.")
STORE_BYTES = Metric("penstock_store_bytes", GAUGE, "bytes", "Bytes of values that are there.")
STORE_CAPACITY = Metric("penstock_store_capacity_bytes", GAUGE, "bytes", "What may be there: store.max_bytes.")
STORE_LEASES = Metric("penstock_store_leases", GAUGE, "leases", "Leases that are held.")
STORE_LEASE_WAIT = Metric("penstock_store_lease_wait_seconds", HISTOGRAM, "seconds",
    "From the request of a lease until it was given.", labels=("stage",), buckets=SHORT_S)
STORE_STALENESS = Metric("penstock_store_staleness_versions", HISTOGRAM, "versions",
    "Staleness of the oldest token of each row, when its batch was formed.", buckets=VERSIONS)
STORE_DROPPED = Metric("penstock_store_dropped_rows_total", COUNTER, "rows",
    "Rows that ended untrained, by reason.", labels=("reason",))
STORE_SEEN = Metric("penstock_store_seen_timestamp_seconds", GAUGE, "seconds",
    "When the store said so last. Unix time: the run goes on as long as it is young.")

# Rewards

REWARD_SAMPLES = Metric("penstock_reward_samples_total", COUNTER, "samples", "Samples that have a reward.")
REWARD_LATENCY = Metric("penstock_reward_latency_seconds", HISTOGRAM, "seconds",
    "From the lease of a sample until its result, errors included.", buckets=SHORT_S)
REWARD_ERRORS = Metric("penstock_reward_errors_total", COUNTER, "samples",
    "Samples without a reward, by reason: raised, bad_value, timeout, crash.", labels=("reason",))

# Environments

ENVIRONMENT_ATTEMPTS = Metric("penstock_environment_attempts_total", COUNTER, "attempts",
    "Attempts that have ended: completed, truncated, rejected, failed.", labels=("outcome",), condition=IN_ENVIRONMENTS)
ENVIRONMENT_TURNS = Metric("penstock_environment_turns_total", COUNTER, "turns",
    "Turns of the attempts that have ended.", condition=IN_ENVIRONMENTS)
ENVIRONMENT_ATTEMPT = Metric("penstock_environment_attempt_seconds", HISTOGRAM, "seconds",
    "One attempt, from its task to its end.", buckets=LONG_S, condition=IN_ENVIRONMENTS)

# The driver

RUN_LOST = Metric("penstock_run_members_lost_total", COUNTER, "members",
    "Members that died or hung, and restarts that failed, by their role.", labels=("member_role",))
RUN_REPLACED = Metric("penstock_run_members_replaced_total", COUNTER, "members",
    "Members whose place another one took, by their role.", labels=("member_role",))

# fmt: on
METRICS: dict[str, tuple[Metric, ...]] = {
    "rollout": (
        ROLLOUT_TOKENS,
        ROLLOUT_SAMPLES,
        ROLLOUT_BUSY,
        ROLLOUT_RUNNING,
        ROLLOUT_WAITING,
        ROLLOUT_KV_CACHE,
        ROLLOUT_PREFIX_LOOKUPS,
        ROLLOUT_PREFIX_HITS,
        ROLLOUT_LOAD,
        ROLLOUT_LOAD_PHASES,
    ),
    "trainer": (
        TRAINER_STEPS,
        TRAINER_SAMPLES,
        TRAINER_TOKENS,
        TRAINER_PHASES,
        TRAINER_LAST_STEP,
        TRAINER_FLOPS,
        TRAINER_MFU,
        TRAINER_MEMORY,
        TRAINER_MISMATCH,
    ),
    "store": (
        STORE_ROWS,
        STORE_ADMITTED,
        STORE_BYTES,
        STORE_CAPACITY,
        STORE_LEASES,
        STORE_LEASE_WAIT,
        STORE_STALENESS,
        STORE_DROPPED,
        STORE_SEEN,
    ),
    "reward": (REWARD_SAMPLES, REWARD_LATENCY, REWARD_ERRORS),
    "environment": (ENVIRONMENT_ATTEMPTS, ENVIRONMENT_TURNS, ENVIRONMENT_ATTEMPT),
    "driver": (RUN_LOST, RUN_REPLACED),
}  # fmt: skip
"""Metrics by the role of the process that measures them."""
