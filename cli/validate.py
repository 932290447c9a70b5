"""``tseeds validate PIPELINE``: the resolved pipeline, or one line per mistake; with --estimate, what it will need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tseeds_cli.options import JsonOption, SetOption

if TYPE_CHECKING:
    from tseeds.config import Pipeline
    from tseeds.estimate import Estimate


def validate(
    pipeline: Annotated[Path, typer.Argument(help="Pipeline file (.toml).")],
    sets: SetOption = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Print what it will need instead: memory, disk, time per iteration.")
    ] = False,
    device: Annotated[str, typer.Option(help="For --estimate: auto, cpu or gpu.")] = "auto",
    response_tokens: Annotated[
        float | None, typer.Option(help="For --estimate: mean response length; default half of the budget.")
    ] = None,
    sampling_rate: Annotated[
        float | None, typer.Option(help="For --estimate: tokens/s that all engines sample together.")
    ] = None,
    update_rate: Annotated[
        float | None, typer.Option(help="For --estimate: tokens/s that the update trains on.")
    ] = None,
    gpu_memory_gb: Annotated[float, typer.Option(help="For --estimate: memory of one GPU.")] = 80.0,
    as_json: JsonOption = False,
) -> None:
    """Print the resolved pipeline with every default and what each value means, or one clear line per mistake."""
    import json

    from tseeds import config as configuration

    config = configuration.load(pipeline, sets or ())
    if estimate:
        found = _estimate(config, device, response_tokens, sampling_rate, update_rate, gpu_memory_gb)
        typer.echo(json.dumps(record(found), indent=1) if as_json else "\n".join(lines(found)))
        return
    typer.echo(json.dumps(config.model_dump(mode="json"), indent=1) if as_json else configuration.dumps(config))


def _estimate(
    config: Pipeline, device: str, response: float | None, sampling: float | None, update: float | None, memory: float
) -> Estimate:
    import shutil

    from tseeds import estimate as estimating
    from tseeds.errors import UserError

    model = estimating.read_model(config)
    if device not in ("auto", "cpu", "gpu"):
        raise UserError(f"--device {device}: choose auto, cpu or gpu")
    for name, value in (
        ("response-tokens", response),
        ("sampling-rate", sampling),
        ("update-rate", update),
        ("gpu-memory-gb", memory),
    ):
        if value is not None and value <= 0:
            raise UserError(f"--{name} {value:g}: must be above 0")
    large = model.parameters > 500_000_000  # nobody trains these on a CPU
    kind: estimating.Device = (
        "gpu" if device == "gpu" or (device == "auto" and (large or shutil.which("nvidia-smi"))) else "cpu"
    )
    return estimating.estimate(
        config,
        model,
        device=kind,
        response_tokens=response,
        sampling_rate=sampling,
        update_rate=update,
        gpu_memory_gb=memory,
    )


def record(found: Estimate) -> dict[str, Any]:
    """The estimate for programs: bytes, seconds, tokens/s."""
    import dataclasses

    return dataclasses.asdict(found)


def lines(found: Estimate) -> list[str]:
    """The estimate for people."""
    from tseeds_cli.console import duration, size

    gpu = found.device == "gpu"
    out = [
        f"{found.parameters:,} parameters, {found.trained:,} trained; on {'GPU' if gpu else 'CPU'}",
        "estimates"
        + ("; no figure for a GPU has been compared with one" if gpu else ", see docs/estimate.md for how good"),
    ]

    def table(title: str, parts: list[Any], total: str, show: Any) -> None:
        out.extend(["", title])
        out.extend(f"  {p.name:22} {show(p.value):>12}  {p.note}".rstrip() for p in parts if p.value)
        out.append(f"  {total}")

    where = "one GPU" if gpu else "one process"
    table(f"update, {where}", found.trainer, f"peak {size(found.trainer_peak)} at full-length responses", size)
    table(f"sampling, {where}", found.engine, f"peak {size(found.engine_peak)}", size)
    if gpu:
        held = sum(p.value for p in found.trainer if p.name in ("fp32 master weights", "Adam moments", "compute copy"))
        out.append(
            f"  on a GPU that they share the trainer keeps {size(held)} meanwhile; the engine sleeps in the update"
        )
    else:
        both = found.trainer_peak + found.engine_peak - found.engine[0].value
        out.append(f"  engine and trainer share one process on a CPU: {size(both)} together")
    table("disk", found.disk, f"{size(found.disk_end)} at the end, at most {size(found.disk_peak)}", size)
    table("one iteration", found.time, f"{duration(found.iteration_seconds)}, evaluation apart", duration)
    return out
