"""Policy directories: what belongs to one, its digest, its probe."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tseeds.artifacts.disk import read_object
from tseeds.errors import UserError

PROBE_FILE = "probe.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_BASE = "base_model_name_or_path"
_OTHER = ("config.json", "generation_config.json", ADAPTER_CONFIG)


def is_policy(folder: Path) -> bool:
    """Whether a directory looks like a policy: a model's, or an adapter's."""
    return (folder / "config.json").is_file() or (folder / ADAPTER_CONFIG).is_file()


def policy_files(policy: Path) -> list[Path]:
    """The files that make a policy: config, safetensors, tokenizer; sorted by name. Nothing else in the directory counts.

    A LoRA adapter in peft's format is a policy too; ``model_directory`` is its base.

    Raises:
        UserError: not a model directory, pickled weights only, or a shard named by the index is missing.
    """
    policy = Path(policy)
    if not policy.is_dir():
        if (policy.parent / "pruned.json").is_file():
            raise UserError(f"{policy}: removed by retention (snapshot.keep_states); restore it from a backup")
        raise UserError(f"{policy}: no such policy directory; name a Hugging Face model directory on this machine")
    if not is_policy(policy):
        raise UserError(f"{policy}: no config.json; not a Hugging Face model directory")
    weights = sorted(policy.glob("*.safetensors"))
    index = policy / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
            if not all(isinstance(s, str) and 0 < len(s) < 256 and "/" not in s for s in shards):
                raise ValueError
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise UserError(f"{index}: not a safetensors index; copy the model again") from None
        missing = sorted(s for s in shards if not (policy / str(s)).is_file())
        if missing:
            raise UserError(f"{policy}: shard {missing[0]} named by the index is missing; copy the model again")
        weights = [index, *weights]
    if not weights:
        pickled = [*policy.glob("*.bin"), *policy.glob("*.pt"), *policy.glob("*.pth")]
        why = f"only pickled weights ({pickled[0].name}), which are refused" if pickled else "no *.safetensors"
        raise UserError(f"{policy}: {why}; save the model with save_pretrained(safe_serialization=True)")
    named = [policy / n for n in (*_OTHER, *TOKENIZER_FILES) if (policy / n).is_file()]
    if "auto_map" in _config(policy):  # its code came with it
        named += policy.glob("*.py")
    return sorted({*named, *weights}, key=lambda p: p.name)


def _config(policy: Path) -> dict[str, Any]:
    file = policy / "config.json"
    return read_object(file, "copy the model again") if file.is_file() else {}


def model_directory(policy: Path) -> Path:
    """Where configuration and tokenizer of a policy lie: in it, or in the base that a LoRA adapter (peft's format) names.

    Raises:
        UserError: adapter_config.json is not readable or names no model directory.
    """
    file = Path(policy) / ADAPTER_CONFIG
    if (Path(policy) / "config.json").is_file() or not file.is_file():
        return Path(policy)
    base = Path(policy) / str(read_object(file, "copy the adapter again").get(_BASE))
    if not (base / "config.json").is_file():
        raise UserError(f"{file}: base_model_name_or_path {base} is no model directory; write its path there")
    return base


def check_base(adapter: Path, digest: str) -> None:
    """Compare the digest of an adapter's base with the one that the adapter's weights record, where they record one.

    Raises:
        UserError: it was trained on another base.
    """
    from safetensors import SafetensorError, safe_open

    file = adapter / ADAPTER_WEIGHTS
    try:
        with safe_open(file, framework="numpy") as handle:
            recorded = (handle.metadata() or {}).get("base", digest)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: damaged ({error}); copy the adapter again") from None
    if recorded != digest:
        raise UserError(
            f"{adapter}: an adapter of another policy than {model_directory(adapter)} (digest {recorded[:12]}, here "
            f"{digest[:12]}); name its own base in {ADAPTER_CONFIG}"
        )


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def policy_digest(policy: Path) -> str:
    """sha256 over (name, sha256) of the policy's files: equal digests sample equally. The probe does not count.

    Nor does the place where an adapter finds its base: the digest of its base stands in adapters that tseeds wrote.
    """
    lines = "".join(f"{p.name} {_part_digest(p)}\n" for p in policy_files(policy))
    return hashlib.sha256(lines.encode()).hexdigest()


def _part_digest(file: Path) -> str:
    if file.name != ADAPTER_CONFIG:
        return file_digest(file)
    values = {k: v for k, v in read_object(file, "copy the adapter again").items() if k != _BASE}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def write_adapter_config(out: Path, values: Mapping[str, Any], base: Path) -> None:
    """Write adapter_config.json (peft's ``values``) of the adapter at ``out``, naming its base relative to it.

    A run moves as a whole, so a path inside it stays right.
    """
    values = {**values, _BASE: os.path.relpath(base.resolve(), out.resolve())}
    (out / ADAPTER_CONFIG).write_text(json.dumps(values, sort_keys=True, indent=2))


def place_adapter(adapter: Path, out: Path) -> None:
    """Write the adapter_config.json of a copy of ``adapter`` at ``out``."""
    values = read_object(adapter / ADAPTER_CONFIG, "copy the adapter again")
    write_adapter_config(out, values, model_directory(adapter))


def probe_sequences(vocab_size: int, *, sequences: int = 3, length: int = 12) -> list[list[int]]:
    """Fixed token sequences that cover the vocabulary: the same for every policy of this vocabulary."""
    return [[(7919 * (i * length + j + 1) + 104729 * i) % vocab_size for j in range(length)] for i in range(sequences)]


def write_probe(policy: Path, logprobs: list[list[float]], ids: list[list[int]], dtype: str) -> None:
    """Store the trainer-side log-probs of the probe sequences beside the weights.

    ids [n][length]; logprobs [n][length - 1], of token t given tokens < t at temperature 1; dtype: compute precision.
    """
    (policy / PROBE_FILE).write_text(json.dumps({"ids": ids, "logprobs": logprobs, "dtype": dtype}))


def read_probe(policy: Path) -> dict | None:
    """The stored probe {ids, logprobs, dtype}, or None where the policy has none."""
    try:
        return json.loads((policy / PROBE_FILE).read_text())
    except FileNotFoundError:
        return None
    except RecursionError:
        raise ValueError("nested too deeply") from None
