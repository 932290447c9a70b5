"""All Arrow schemas. Flat columns, lists of int32/float32, no structs; ids are the truth and text is for reading.

Joins between stages are on row_id, problem_id and seed_id.
"""

from __future__ import annotations

import pyarrow as pa

_IDS = pa.list_(pa.int32())
_FLOATS = pa.list_(pa.float32())

PROBLEMS = pa.schema(
    [
        ("problem_id", pa.string()),
        ("prompt", pa.string()),  # as the policy reads it, special tokens shown
        ("prompt_ids", _IDS),
        ("problem", pa.string()),  # as the data set has it
        ("gold", pa.string()),
        ("task", pa.string()),  # which grader
        ("source", pa.string()),
        ("difficulty", pa.string()),  # null where the data set has none
    ]
)

QUARANTINE = pa.schema(
    [
        ("file", pa.string()),
        ("row", pa.int64()),  # 0-based position in the file
        ("problem_id", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
    ]
)

CURRICULUM = pa.schema(
    [
        ("problem_id", pa.string()),
        ("pass_rate", pa.float32()),  # mean reward of the base policy's responses
        ("rewards", _FLOATS),  # one per response
        ("lengths", _IDS),  # tokens of each response
        ("truncated", pa.int32()),  # responses that hit the budget
        ("verdicts", pa.list_(pa.string())),
    ]
)

SEED = pa.schema(
    [
        ("seed_id", pa.string()),
        ("problem_id", pa.string()),
        ("group_id", pa.string()),
        ("slot", pa.int32()),  # first sample of the group that continues this seed
        ("snapshot", pa.string()),  # digest of the policy that wrote it
        ("snapshot_step", pa.int32()),
        ("ids", _IDS),  # empty for position suffix, where the snapshot writes after the rollout's beginning
        ("logprobs", _FLOATS),  # of the snapshot at the seed's temperature
        ("chain_length", pa.int32()),  # tokens of the chain before the cut
        ("cut", pa.float32()),  # the drawn cut: fraction of the chain, or tokens
        ("origin", pa.string()),  # live | replay
        ("chain_reward", pa.float32()),  # null where the chain was not graded
        ("finish_reason", pa.string()),  # of the chain: stop | length
        ("outcome", pa.string()),  # used | too_short | no_fit | no_chain: why a planned seed is empty
        ("temperature", pa.float32()),
        ("rng_seed", pa.int64()),
        ("text", pa.string()),
    ]
)

ROLLOUT = pa.schema(
    [
        ("row_id", pa.string()),
        ("problem_id", pa.string()),
        ("group_id", pa.string()),
        ("sample", pa.int32()),
        ("policy", pa.string()),  # digest of pi_old
        ("policy_step", pa.int32()),
        ("seed_id", pa.string()),  # null for unseeded rows
        ("snapshot_step", pa.int32()),  # null for unseeded rows
        ("position", pa.string()),  # none | prefix | suffix | whole
        ("prompt_ids", _IDS),
        ("response_ids", _IDS),
        ("logprobs", _FLOATS),  # behaviour log-prob of every response token
        ("off_start", pa.int32()),  # [off_start, off_stop) of the response was written by the snapshot
        ("off_stop", pa.int32()),
        ("finish_reason", pa.string()),  # stop | length
        ("temperature", pa.float32()),
        ("rng_seed", pa.int64()),
        ("text", pa.string()),
    ]
)

SCORE = pa.schema(
    [
        ("row_id", pa.string()),
        ("problem_id", pa.string()),
        ("extracted", pa.string()),
        ("canonical", pa.string()),  # canonical form, equal for equal solutions
        ("verdict", pa.string()),
        ("reward", pa.float32()),
        ("grader", pa.string()),
        ("wall_ms", pa.float32()),
        ("detail", pa.string()),  # for error, timeout and unparsable_gold: why
    ]
)

EVALUATION = pa.schema(
    [
        ("row_id", pa.string()),
        ("problem_id", pa.string()),
        ("benchmark", pa.string()),
        ("difficulty", pa.string()),  # null where the benchmark has none
        ("sample", pa.int32()),  # 0 .. n - 1; -1 for the greedy one beside them
        ("policy", pa.string()),  # digest of the evaluated policy
        ("policy_step", pa.int32()),
        ("response_ids", _IDS),
        ("logprobs", _FLOATS),  # of the distribution that was sampled from: temperature and top_p included
        ("finish_reason", pa.string()),  # stop | length
        ("temperature", pa.float32()),
        ("extracted", pa.string()),
        ("canonical", pa.string()),
        ("verdict", pa.string()),
        ("reward", pa.float32()),
        ("rng_seed", pa.int64()),
        ("text", pa.string()),
        ("wall_ms", pa.float32()),
    ]
)

MIXED = pa.schema(
    [
        *EVALUATION,
        ("snapshot", pa.string()),  # digest of the policy that wrote [0, off_stop); null where there is none
        ("snapshot_step", pa.int32()),
        ("lag", pa.int32()),  # policy_step - snapshot_step
        ("seed_length", pa.int32()),  # tokens asked for: 0 is the final policy alone, -1 the snapshot alone
        ("off_start", pa.int32()),
        ("off_stop", pa.int32()),  # less than seed_length where the snapshot finished earlier
    ]
)

EVALUATION_METRICS = pa.schema(
    [
        ("benchmark", pa.string()),
        ("policy_step", pa.int32()),
        ("difficulty", pa.string()),  # null: all problems
        ("metric", pa.string()),  # pass, maj, distinct, truncated, ...
        ("k", pa.int32()),  # null where the metric has no k
        ("value", pa.float64()),
        ("lo", pa.float64()),  # bootstrap interval over problems
        ("hi", pa.float64()),
        ("problems", pa.int32()),
    ]
)

MEASUREMENTS = frozenset({"wall_ms"})
"""Columns that time the machine: not data, left out of content digests and of every promise of equality."""

UPDATE_ROWS = pa.schema(
    [
        ("row_id", pa.string()),
        ("problem_id", pa.string()),
        ("group_id", pa.string()),
        ("reward", pa.float32()),
        ("advantage", pa.float32()),
        ("used", pa.bool_()),  # false: dropped from the loss (overlong, rejected, degenerate)
        ("snapshot_age", pa.int32()),  # iterations between the snapshot and the rollout; null for unseeded rows
        ("seed_tokens", pa.int32()),
        ("continuation_tokens", pa.int32()),
        ("ratio_seed", pa.float32()),  # means over tokens with A != 0; null where the row has none
        ("clip_fraction_seed", pa.float32()),
        ("entropy_seed", pa.float32()),  # of pi_old, nats
        ("log_ratio_behaviour_seed", pa.float32()),  # mean lp_old - lp_mu
        ("ratio_continuation", pa.float32()),
        ("clip_fraction_continuation", pa.float32()),
        ("entropy_continuation", pa.float32()),
        ("log_ratio_behaviour_continuation", pa.float32()),
    ]
)

_REGION_METRICS = (
    "tokens", "entropy", "clip_fraction", "clip_fraction_positive_high", "clip_fraction_negative_low",
    "clip_fraction_negative_dual", "clipped_mass", "effective_entropy", "retained_entropy", "ratio_mean", "ratio_max",
    "ess", "ess_share", "kl_k1", "kl_k3",
)  # fmt: skip
_BIN_METRICS = ("entropy", "ratio_mean", "ess_share", "clip_fraction", "clipped_mass")

UPDATE_STEPS = pa.schema(
    [
        ("iteration", pa.int32()),
        ("epoch", pa.int32()),
        ("minibatch", pa.int32()),
        ("step", pa.int64()),  # optimizer steps taken, this one included
        ("skipped", pa.bool_()),  # no token carried a gradient, or the gradient was not finite
        ("rows", pa.int32()),
        ("loss_tokens", pa.int64()),
        ("loss", pa.float32()),
        ("grad_norm", pa.float32()),  # before clipping
        ("learning_rate", pa.float64()),
        ("probe_cosine", pa.float32()),  # of the gradients with and without clipping; null unless update.probe_every
        ("probe_norm_ratio", pa.float32()),  # norm with clipping / norm without
        *((f"{m}_{r}", pa.float32()) for r in ("all", "seed", "continuation") for m in _REGION_METRICS),
        *((f"{m}_{r}_bins", _FLOATS) for r in ("seed", "continuation") for m in _BIN_METRICS),  # ten position bins
    ]
)

UPDATE_TOKENS = pa.schema(
    [
        ("row_id", pa.string()),
        ("position", pa.int32()),  # in the response
        ("region", pa.string()),  # seed | continuation
        ("logprob", pa.float32()),  # at the token's last optimizer step
        ("logprob_old", pa.float32()),
        ("logprob_behaviour", pa.float32()),
        ("entropy", pa.float32()),
        ("advantage", pa.float32()),
        ("ratio", pa.float32()),
        ("weight", pa.float32()),  # what multiplies A grad(logprob) when nothing is clipped
        ("used", pa.bool_()),  # carried loss
        ("clipped", pa.bool_()),
    ]
)
