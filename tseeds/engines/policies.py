"""What an engine must know of a policy before it loads it, from JSON and safetensors headers alone: no torch, no vllm.

Every refusal here is cheaper and clearer than the one a half-loaded engine would give.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tseeds.artifacts.policy import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    check_base,
    model_directory,
    policy_digest,
    policy_files,
)
from tseeds.errors import UserError

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

_COSMETIC = frozenset(
    {
        "_name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "tie_word_embeddings",  # compared on its own
        "attention_dropout",
        "initializer_range",
    }
)
"""Keys of config.json that leave the engine's graph as it is."""


@dataclass(frozen=True)
class Policy:
    """A checked policy directory.

    path: absolute. digest: of policy_digest. config: config.json. eos: token ids that end a response, ascending.
    tensors: shape of every tensor by name. base: of a LoRA adapter, the policy that it changes, whose config, eos and
    tensors these are; rank and targets (names of the linear layers that it changes): the adapter's.
    """

    path: Path
    digest: str
    config: dict[str, Any]
    eos: tuple[int, ...]
    tensors: dict[str, tuple[int, ...]]
    base: Policy | None = None
    rank: int = 0
    targets: tuple[str, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table: every id below it can be embedded."""
        return int(_text(self.config)["vocab_size"])

    @property
    def parameters(self) -> int:
        """Number of weights on disk."""
        return sum(_product(shape) for shape in self.tensors.values())

    @cached_property
    def tokenizer(self) -> str:
        """Digest of the map from text to ids; equal for the same tokenizer saved by different library versions."""
        return _tokenizer_digest(self.base.path if self.base else self.path)


def describe(policy: Path | str) -> Policy:
    """Read and check a policy directory; repeated calls on an unchanged directory cost a few stat calls.

    Raises:
        UserError: not a model directory, a shard missing or cut short, weights of a dtype that is not a float, ...
    """
    path = Path(policy).absolute()
    return _describe(path, _stamp(path))


def _stamp(path: Path) -> tuple[tuple[str, int, int], ...]:
    """(name, mtime in ns, size) of the policy's files."""
    return tuple((p.name, s.st_mtime_ns, s.st_size) for p in policy_files(path) for s in [p.stat()])


@lru_cache(maxsize=64)
def _describe(path: Path, stamp: tuple[tuple[str, int, int], ...]) -> Policy:
    if not (path / "config.json").is_file():
        return _describe_adapter(path)
    config = read_json(path / "config.json")
    if not isinstance(_text(config).get("vocab_size"), int):
        raise UserError(f"{path / 'config.json'}: no vocab_size; not the configuration of a language model")
    tensors: dict[str, tuple[int, ...]] = {}
    for name, _, _ in stamp:
        if name.endswith(".safetensors"):
            tensors |= tensor_shapes(path / name)
    policy = Policy(path=path, digest=policy_digest(path), config=config, eos=eos_ids(path, config), tensors=tensors)
    assert policy.tokenizer  # read now: retention may remove the files while an engine still compares with this policy
    return policy


def _describe_adapter(path: Path) -> Policy:
    """A directory in peft's format; its base is read where adapter_config.json names it, relative to the directory or not."""
    file = path / ADAPTER_CONFIG
    config = read_json(file)
    base = model_directory(path)
    targets = config.get("target_modules")
    lora = config.get("peft_type", "LORA") == "LORA" and isinstance(config.get("r"), int)
    if not lora or not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        raise UserError(f"{file}: not a LoRA adapter whose target_modules are a list of names")
    full = describe(base)
    tensor_shapes(path / ADAPTER_WEIGHTS)
    check_base(path, full.digest)
    return Policy(
        path,
        policy_digest(path),
        full.config,
        full.eos,
        full.tensors,
        base=full,
        rank=config["r"],
        targets=tuple(targets),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the policy."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: missing; not a Hugging Face model directory") from None
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"{path}: not readable JSON ({error}); copy the model again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object; copy the model again")
    return value


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by tensor name from the header of a safetensors file, the file's length checked against it.

    Raises:
        UserError: damaged, cut short, or of a dtype that is not float32, bfloat16 or float16.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            if length > size:
                raise ValueError("header longer than the file")
            header: dict[str, Any] = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            if not all(isinstance(n, int) and n >= 0 for n in (*tensor["shape"], *tensor["data_offsets"])):
                raise ValueError(f"tensor {name[:60]!r} has no shape")
            tensor["dtype"] = str(tensor["dtype"])
        end = max((t["data_offsets"][1] for t in header.values()), default=0)
        if size != 8 + length + end:
            raise ValueError(f"{size} bytes where its header names {8 + length + end}")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error, OSError) as error:
        raise UserError(f"{path}: damaged safetensors file ({error}); copy the model again") from None
    for name, tensor in header.items():
        if tensor["dtype"] not in _DTYPES:
            raise UserError(
                f"{path}: tensor {name} is {tensor['dtype']}; policies hold float32, bfloat16 or float16 weights: "
                "save an unquantised copy"
            )
    return {name: tuple(tensor["shape"]) for name, tensor in header.items()}


def eos_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Token ids that end a response: all that generation_config.json, config.json and the tokenizer name; maybe none."""
    generation = path / "generation_config.json"
    found = _tokenizer_eos(path)
    for source in (read_json(generation) if generation.is_file() else {}, config, _text(config)):
        ids = source.get("eos_token_id")
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(isinstance(i, int) for i in ids):
                raise UserError(f"{path}: eos_token_id {str(ids)[:60]} is no token id; copy the model again")
            found |= set(ids)
    return tuple(sorted(found))


def _tokenizer_eos(path: Path) -> set[int]:
    """The id of the eos_token of tokenizer_config.json; empty where there is none or tokenizer.json does not hold it."""
    config, vocabulary = path / "tokenizer_config.json", path / "tokenizer.json"
    if not config.is_file() or not vocabulary.is_file():
        return set()
    token = read_json(config).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    tokenizer = read_json(vocabulary)
    added = {t.get("content"): t.get("id") for t in tokenizer.get("added_tokens") or () if isinstance(t, dict)}
    model = tokenizer.get("model")
    words = model.get("vocab") if isinstance(model, dict) else None
    found = added.get(text, words.get(text) if isinstance(words, dict) and isinstance(text, str) else None)
    return {found} if isinstance(found, int) else set()


def difference(old: Policy, new: Policy) -> str | None:
    """Why ``new`` cannot be swapped into an engine that was started with ``old``; None where it can."""
    a, b = old.config, new.config
    if a.get("architectures") != b.get("architectures"):
        return f"architecture {_name(b)}, the engine runs {_name(a)}"
    if old.vocab_size != new.vocab_size:
        return f"vocabulary of {new.vocab_size} tokens, the engine's has {old.vocab_size}"
    for key in sorted((a.keys() | b.keys()) - _COSMETIC):
        if a.get(key) != b.get(key) and not _absent_default(a, b, key):
            return f"config.json: {key} = {b.get(key)!r}, the engine runs {a.get(key)!r}"
    tied = [_tied(p.config) for p in (old, new)]
    if tied[0] is not None and tied[1] is not None and tied[0] != tied[1]:
        return "separate output head, the engine's is tied" if tied[0] else "tied output head, the engine's is separate"
    head = {"lm_head.weight"} if True in tied else set()
    for name in sorted((old.tensors.keys() | new.tensors.keys()) - head):
        if old.tensors.get(name) != new.tensors.get(name):
            return f"tensor {name} has shape {new.tensors.get(name)}, the engine's has {old.tensors.get(name)}"
    if old.tokenizer != new.tokenizer:
        return "its tokenizer maps text to other ids than the engine's"
    return None


def _absent_default(a: dict[str, Any], b: dict[str, Any], key: str) -> bool:
    """A key that only one of two library versions writes, holding null or false, changes nothing."""
    return (key not in a or key not in b) and not (a.get(key) or b.get(key))


def _name(config: dict[str, Any]) -> str:
    return ", ".join(config.get("architectures") or [str(config.get("model_type"))])


def _text(config: dict[str, Any]) -> dict[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) and "vocab_size" not in config else config


def _tied(config: dict[str, Any]) -> bool | None:
    """Whether embedding and head share weights; None where config.json leaves it to the model class."""
    return config.get("tie_word_embeddings", _text(config).get("tie_word_embeddings"))


def _product(shape: tuple[int, ...]) -> int:
    number = 1
    for size in shape:
        number *= size
    return number


def _tokenizer_digest(path: Path) -> str:
    file = path / "tokenizer.json"
    if not file.is_file():
        rest = [path / n for n in ("tokenizer.model", "vocab.json", "merges.txt") if (path / n).is_file()]
        return hashlib.sha256(b"".join(hashlib.sha256(p.read_bytes()).digest() for p in rest)).hexdigest()
    return _vocabulary_digest(file, file.stat().st_mtime_ns, os.path.getsize(file))


@lru_cache(maxsize=256)
def _vocabulary_digest(file: Path, mtime: int, size: int) -> str:
    data = file.read_bytes()
    try:
        return _parsed_vocabulary(hashlib.sha256(data).hexdigest(), data)
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{file}: not a tokenizer ({error}); copy the model again") from None


_parsed: dict[str, str] = {}


def _parsed_vocabulary(key: str, data: bytes) -> str:
    """Digest of the parts of tokenizer.json that decide ids; equal files are parsed once (10 MB take 0.3 s)."""
    if key not in _parsed:
        tokenizer = json.loads(data)
        parts = [tokenizer.get(k) for k in ("model", "added_tokens", "normalizer", "pre_tokenizer")]
        _parsed[key] = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return _parsed[key]
