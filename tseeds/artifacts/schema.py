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
    ]
)

MEASUREMENTS = frozenset({"wall_ms"})
"""Columns that time the machine: not data, left out of content digests and of every promise of equality."""
