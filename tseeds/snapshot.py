"""Stage snapshot: an immutable, content-addressed copy of a policy at a training step.

Reads a policy directory; writes the same model directory, or the same LoRA adapter, with ``probe.json`` (trainer-side
log-probs of fixed sequences, against which every engine swap is verified) beside the weights.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tseeds.artifacts.policy import ADAPTER_CONFIG, PROBE_FILE, place_adapter, policy_files
from tseeds.artifacts.rundir import digest_of, recorded_digest
from tseeds.artifacts.store import Identity, Manifest, check_space, link_or_copy, writing
from tseeds.config import Pipeline
from tseeds.context import Context
from tseeds.engines.policies import describe
from tseeds.errors import UserError

STAGE = "snapshot"
VERSION = 1


@dataclass(frozen=True)
class Inputs:
    """policy: model directory; step: training step that made it; link: its files may be hard-linked (they are ours)."""

    policy: Path
    step: int
    link: bool = False


def identity(config: Pipeline, inputs: Inputs) -> Identity:
    """What decides a snapshot: the policy's digest and step."""
    return Identity(
        STAGE,
        VERSION,
        {"step": inputs.step, "policy.dtype": config.policy.dtype},
        {"policy": recorded_digest(inputs.policy)},
    )


def run(config: Pipeline, inputs: Inputs, out: Path, context: Context) -> Manifest:
    """Commit the snapshot at ``out``.

    Raises:
        UserError: the policy directory is unusable (no model or tokenizer that loads), or changed since its digest was recorded.
    """
    ident = identity(config, inputs)
    files = policy_files(inputs.policy)
    size = sum(f.stat().st_size for f in files)
    if digest_of(inputs.policy) != ident.inputs["policy"]:
        raise UserError(
            f"{inputs.policy}: damaged, it differs from the digest recorded when it was written; restore it"
        )
    if not inputs.link:
        describe(inputs.policy)  # everything after it stands on this copy: what cannot be loaded is never committed
        context.tokenizer(inputs.policy)
        check_space(out, size, f"snapshot of step {inputs.step}")
    context.progress.begin(STAGE, 1)
    with writing(out, ident) as writer:
        target = writer.path("")
        probe = inputs.policy / PROBE_FILE
        for file in [*files, *([probe] if probe.is_file() else [])]:
            if file.name == ADAPTER_CONFIG:
                place_adapter(inputs.policy, target)
            elif inputs.link:
                link_or_copy(file, target / file.name)
            else:
                shutil.copyfile(file, target / file.name)
        if not probe.is_file():
            from tseeds.training.trainer import write_probe_for

            write_probe_for(target, config.policy.dtype, trust_remote_code=config.policy.trust_remote_code)
        writer.facts.update(policy=ident.inputs["policy"], step=inputs.step, bytes=size)
    context.progress.advance(1)
    context.progress.end()
    assert writer.manifest is not None
    return writer.manifest
