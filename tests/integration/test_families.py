"""Model families as researchers bring them: each is trained one iteration and sampled by both engines.

Random weights, real architectures: grouped-query attention, tied and separate heads, several end-of-sequence ids, sharded
safetensors, chat templates, and tokenizers that put a beginning of sequence before every text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from tseeds import config as configuration
from tseeds.artifacts.policy import policy_digest
from tseeds.context import Context
from tseeds.engines import Engine, Request
from tseeds.pipeline import run_pipeline
from tseeds.training.logprobs import load_policy

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PROMPTS = {
    CHATML: "<|im_start|>user\n1 + 2<|im_end|>\n<|im_start|>assistant\n",
    LLAMA: "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1 + 2<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    GEMMA: "<bos><start_of_turn>user\n1 + 2<end_of_turn>\n<start_of_turn>model\n",
}


@dataclass(frozen=True)
class Family:
    """A model type of transformers with what its published models set; ends: the tokens that end a response."""

    model_type: str
    template: str
    ends: tuple[str, str]
    bos: str | None = None
    adds_bos: bool = False
    values: dict[str, Any] = field(default_factory=dict)


WIDE = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
CHATML_ENDS = ("<|im_end|>", "<|endoftext|>")
FAMILIES = {
    "qwen2.5-tied": Family("qwen2", CHATML, CHATML_ENDS, values={"tie_word_embeddings": True}),
    "qwen2.5-untied": Family("qwen2", CHATML, CHATML_ENDS, values={"tie_word_embeddings": False}),
    "qwen3": Family("qwen3", CHATML, CHATML_ENDS, values={**WIDE, "tie_word_embeddings": False}),
    "llama3": Family(
        "llama",
        LLAMA,
        ("<|eot_id|>", "<|end_of_text|>"),
        bos="<|begin_of_text|>",
        adds_bos=True,
        values={
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "smollm2": Family("llama", CHATML, CHATML_ENDS, bos="<|im_start|>", values={"tie_word_embeddings": True}),
    "gemma3": Family(
        "gemma3_text",
        GEMMA,
        ("<end_of_turn>", "<eos>"),
        bos="<bos>",
        adds_bos=True,
        values={
            **WIDE,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 32,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


def make_tokenizer(family: Family) -> Any:
    """One token a byte, and the family's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    turns = {CHATML: ["<|im_start|>"], LLAMA: ["<|start_header_id|>", "<|end_header_id|>"], GEMMA: ["<start_of_turn>"]}
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=family.bos,
        eos_token=family.ends[0],
        pad_token=family.ends[1],
        additional_special_tokens=turns[family.template],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = family.template
    if family.adds_bos:
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", pair=f"{family.bos} $A $B", special_tokens=[(family.bos, made.bos_token_id)]
        )
    return made


def make_policy(path: Path, family: Family) -> Path:
    """A random policy of the family, in several shards, with two end-of-sequence ids in generation_config.json alone."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    tokenizer = make_tokenizer(family)
    ends = tokenizer.convert_tokens_to_ids(list(family.ends))
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2} | {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
    }
    settings = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": ends[0], "pad_token_id": ends[1]}
    config = CONFIG_MAPPING[family.model_type](vocab_size=len(tokenizer), **settings, **(shape | family.values))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(6)
    assert model.num_parameters() < 200_000
    model.generation_config.eos_token_id = ends
    model.save_pretrained(path, max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    tokenizer.save_pretrained(path)
    return path


def pipeline(folder: Path, policy: Path, backend: str) -> configuration.Pipeline:
    """One iteration with seeds; the verifier rewards about half of all responses."""
    rows = [{"problem": f"{n} + {n + 1}", "answer": str(2 * n + 1)} for n in range(1, 7)]
    (folder / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "verifier.py").write_text("def odd(gold, text):\n    return sum(map(ord, text)) % 2\n")
    return configuration.parse(
        {
            "run": {"iterations": 1},
            "policy": {"path": str(policy), "dtype": "float32"},
            "problems": {
                "path": str(folder / "train.jsonl"),
                "task": f"python:{folder / 'verifier.py'}:odd",
                "max_prompt_tokens": 96,
            },
            "seed": {"lo": 0.2, "hi": 0.8},
            "rollout": {"problems_per_iteration": 4, "group_size": 4, "max_response_tokens": 24},
            "update": {"learning_rate": 3e-3, "minibatches": 2},
            "engine": {"backend": backend, "kv_cache_gb": 0.1},
        }
    )


def sampled(engine: Engine, prompts: list[list[int]]) -> list[Any]:
    requests = [Request(ids=ids, max_tokens=24, seed=n, temperature=0.0) for n, ids in enumerate(prompts)]
    return [done for _, done in sorted(engine.sample(requests), key=lambda pair: pair[0])]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_and_both_engines_follow(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    policy = make_policy(tmp_path / "policy", family)
    tokenizer = make_tokenizer(family)
    ends = set(tokenizer.convert_tokens_to_ids(list(family.ends)))
    greedy = {}
    for backend in ("transformers", "vllm"):
        config = pipeline(tmp_path, policy, backend)
        with Context(config) as context:
            run = run_pipeline(config, tmp_path / backend, context)
            rows = pl.read_parquet(f"{run.root}/iterations/*/rollout/*.parquet")
            if not greedy:
                updated = run.stage(1, "update") / "policy"
            assert context.engine().load(updated) == policy_digest(updated)  # swapped, its probe compared
            greedy[backend] = sampled(context.engine(), rows["prompt_ids"].to_list()[::4])
        (line,) = [json.loads(text) for text in run.metrics.read_text().splitlines()]
        assert line["mismatch"] < 1e-4
        assert rows.height == 16
        assert rows["seed_id"].is_not_null().sum() > 0
        check_prompts_and_ends(rows, family, tokenizer, ends)
    check_trained(policy, updated)
    trained = load_policy(updated, dtype="float32")
    assert trained.packable
    for a, b in zip(greedy["transformers"], greedy["vllm"], strict=True):
        assert a.ids == b.ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def check_prompts_and_ends(rows: pl.DataFrame, family: Family, tokenizer: Any, ends: set[int]) -> None:
    """The template's prompt, one beginning of sequence where the family has one, and responses that end at any end."""
    for row in rows.iter_rows(named=True):
        prompt = re.sub(r"[1-6] \+ [2-7]", "1 + 2", tokenizer.decode(row["prompt_ids"]))
        assert prompt == PROMPTS[family.template]
        if family.adds_bos:
            assert row["prompt_ids"].count(tokenizer.bos_token_id) == 1
            assert row["prompt_ids"][0] == tokenizer.bos_token_id
        assert not ends & set(row["response_ids"][:-1])
        assert (row["finish_reason"] == "stop") == (row["response_ids"][-1] in ends)


def check_trained(before: Path, after: Path) -> None:
    """The new policy has the old one's files, and every tensor of it that is no constant moved."""
    names = sorted(f.name for f in before.glob("*.safetensors"))
    assert names == sorted(f.name for f in after.glob("*.safetensors"))
    moved = []
    for name in names:
        old, new = load_file(before / name), load_file(after / name)
        assert old.keys() == new.keys()
        moved += [not torch.equal(old[key], new[key]) for key in old]
    assert all(moved)
