"""Real engines for tests: tiny random policies, and one vLLM engine for the whole session."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tseeds.artifacts.policy import probe_sequences, write_probe
from tseeds.config import EngineConfig
from tseeds.engines import Engine, Request, open_engine, probe

VOCABULARY = 110
EOS = (1, 5)


def _make_policy(path: Path, *, seed: int, tied: bool, layers: int = 2, vocabulary: int = VOCABULARY) -> Path:
    """A random Qwen2-style policy with a word-level tokenizer, two end-of-sequence ids and its probe."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        eos_token_id=EOS[0],
        bos_token_id=2,
        pad_token_id=0,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.3 if "embed" in name or "lm_head" in name else 0.1)
    torch.random.set_rng_state(state)
    model.generation_config.eos_token_id = list(EOS)
    model.save_pretrained(path)
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<bos>", *(f"w{i}" for i in range(vocabulary - 3))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>"
    ).save_pretrained(path)
    ids = probe_sequences(vocabulary)
    write_probe(path, probe.score(model.eval(), ids), ids, "float32")
    return path


@pytest.fixture(scope="session")
def make_policy() -> Callable[..., Path]:
    """A function that makes a random policy: path, seed, tied, layers, vocabulary."""
    return _make_policy


@pytest.fixture(scope="session")
def tied_policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three policies of one architecture with a tied head."""
    root = tmp_path_factory.mktemp("tied")
    return [_make_policy(root / f"policy-{seed}", seed=seed, tied=True) for seed in range(3)]


@pytest.fixture(scope="session")
def untied_policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two policies of one architecture with a separate head."""
    root = tmp_path_factory.mktemp("untied")
    return [_make_policy(root / f"policy-{seed}", seed=seed, tied=False) for seed in range(2)]


@pytest.fixture
def copy_policy(tmp_path: Path):
    """A function that copies a policy, for damaging the copy."""

    def copy(policy: Path, name: str = "copy") -> Path:
        return shutil.copytree(policy, tmp_path / name)

    return copy


@pytest.fixture(scope="module")
def vllm_engine() -> Iterator[Engine]:
    """One vLLM engine in float32 for all tests of a file; it takes policies like ``tied_policies``.

    Not for the session: vLLM shares its process groups among the engines of a process, and the first one that closes (those
    of test_families) ends them for all.
    """
    engine = open_engine(EngineConfig(kv_cache_gb=0.25), dtype="float32", max_model_len=128)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def transformers_engine() -> Iterator[Engine]:
    """The reference engine in float32."""
    engine = open_engine(EngineConfig(backend="transformers", kv_cache_gb=0.25), dtype="float32", max_model_len=128)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def sample_requests() -> list[Request]:
    """48 requests of different lengths, temperatures and budgets, some with equal prompts."""
    import random

    rng = random.Random(7)
    made = []
    for index in range(48):
        ids = [rng.randrange(6, VOCABULARY) for _ in range(rng.randrange(1, 40))]
        if index % 4 == 3:
            ids = list(made[-1].ids)
        made.append(
            Request(
                ids=ids,
                max_tokens=rng.randrange(1, 24),
                seed=rng.getrandbits(63),
                temperature=rng.choice([1.0, 0.7, 1.3]),
            )
        )
    return made


@pytest.fixture(scope="session")
def adapters(tied_policies: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two LoRA adapters of the first policy with random weights."""
    peft = pytest.importorskip("peft", reason="adapters need the optional peft")
    import torch
    from transformers import AutoModelForCausalLM

    made = []
    for seed in (0, 1):
        base = AutoModelForCausalLM.from_pretrained(tied_policies[0], dtype=torch.float32)
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        made.append(tmp_path_factory.mktemp("adapters") / f"adapter-{seed}")
        model.save_pretrained(made[-1])
    return made
