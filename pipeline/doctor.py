"""`lengthwise doctor`: what is installed and works here, and what a model would take on a TPU that is not here."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model import checkpoint
from model.config import CheckpointError, EncoderConfig
from pipeline.config import CheckupSettings, SettingsError
from pipeline.packing import places
from pipeline.shapes import ShapeTable, shape_table
from pipeline.versions import versions

if TYPE_CHECKING:
    from model.ahead import Estimate

MIB = 2**20
# What is tried where no model is given.
BERT_BASE = EncoderConfig(
    model_type="bert", layers=12, embedding_dimensions=768, heads=12, feedforward_dimensions=3072,
    vocabulary_size=30522, positions=512, token_types=2, activation="gelu", norm_epsilon=1e-12, max_tokens=512,
    pooling="mean", normalize=False,
)  # fmt: skip


def examine(settings: CheckupSettings) -> int:
    """Prints what was found, as text or JSON.

    Returns:
      0: all good; 1: there is no such device, no attention implementation works, or a full batch does not fit.

    Raises:
      SettingsError: a setting or the checkpoint cannot work.
    """
    try:
        config = BERT_BASE
        if settings.model is not None:
            config = EncoderConfig.from_checkpoint(_locate(settings.model))
    except CheckpointError as error:
        raise SettingsError(str(error)) from error
    found = {"versions": versions(), "model": settings.model or "BERT-base"}
    found |= _ahead(settings, config) if settings.tpu is not None else _here(settings, config)
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # whatever the locale, and names that are not UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    if settings.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_text(found)))
    return 0 if found["good"] else 1


def _locate(model: str) -> Path:
    if "://" not in model:
        return checkpoint.locate(model)
    from pipeline import checkpoints  # Beam takes seconds to import: only where it is needed

    return checkpoints.folder(model)


def _here(settings: CheckupSettings, config: EncoderConfig) -> dict[str, Any]:
    """Every device of this machine, and every implementation on the one that a run would take."""
    from kernels.attention import select
    from model import predictor

    try:
        device = predictor.resolve_device(settings.device)
        present = {kind: predictor.local_devices(kind) for kind in ("tpu", "gpu", "cpu")}
    except predictor.DeviceError as error:
        return {"good": False, "problem": str(error)}
    dtype = predictor.resolve_dtype(settings.dtype, device)
    shapes = _shapes(settings, config, device, len(present[device]))
    cases = predictor.cases(config, dtype, shapes.shapes, shapes.local_devices)
    tried = []
    for implementation in select.IMPLEMENTATIONS:
        refusal = select.refusal(implementation, cases, present[device][0])
        row: dict[str, Any] = {"name": implementation.name, "problem": refusal}
        if refusal is None:
            row |= asdict(select.canary(implementation, cases, present[device][0]))
        tried.append(row)
    wanted = [row for row in tried if settings.attention in (select.AUTO, row["name"])]
    if not wanted:
        names = ", ".join([select.AUTO, *(row["name"] for row in tried)])
        raise SettingsError(f"--attention: expected one of {names}, got {settings.attention!r}")
    chosen = next((row["name"] for row in wanted if row["problem"] is None), None)
    return {
        "good": chosen is not None,
        "devices": {kind: [it.device_kind for it in them] for kind, them in present.items() if them},
        "device": device,
        "dtype": dtype,
        "attention": tried,
        "chosen": chosen,
    }  # fmt: skip


def _ahead(settings: CheckupSettings, config: EncoderConfig) -> dict[str, Any]:
    """What each full batch would take on one device of a TPU, and where one does not fit, the largest that does."""
    from kernels.attention.select import SelectionError
    from kernels.tpu import CHIPS, NoCompiler
    from model import ahead

    chip = str(settings.tpu)
    dtype = "bfloat16" if settings.dtype == "auto" else settings.dtype
    shapes = _shapes(settings, config, "tpu", 1)
    try:
        attention, reasons = ahead.choose_attention(
            settings.attention, config, dtype, shapes.shapes, chip
        )
    except NoCompiler as error:
        raise SettingsError(f"--tpu {chip}: {error}") from error
    except SelectionError as error:
        raise SettingsError(f"--{error}") from error
    estimates: list[Estimate] = []
    for B, T in shapes.full:
        fits = False
        while B and not fits:
            print(f"Compiling {B}×{T} for {chip} …", file=sys.stderr, flush=True)
            estimates.append(
                ahead.estimate(config, chip, (B, T), dtype, attention=attention, segments=places(T))
            )
            fits = not estimates[-1].out_of_memory
            B //= 2
    return {
        "good": all(it.problem is None for it in estimates),
        "device": chip,
        "hbm_bytes": CHIPS[chip].hbm_bytes,
        "dtype": dtype,
        "chosen": attention.name,
        "attention": [{"name": name, "problem": why} for name, why in reasons.items()],
        "shapes": [asdict(it) for it in estimates],
    }


def _shapes(
    settings: CheckupSettings, config: EncoderConfig, device: str, devices: int
) -> ShapeTable:
    window = settings.window_tokens or config.max_tokens
    if window > config.positions:
        raise SettingsError(f"--window-tokens: expected at most {config.positions}, got {window}")
    return shape_table(device, window, settings.max_tokens_per_batch, devices)


def _text(found: dict[str, Any]) -> list[str]:
    lines = [", ".join(f"{name} {version}" for name, version in found["versions"].items())]
    if "problem" in found:
        return [*lines, found["problem"]]
    if "shapes" in found:
        return [*lines, *_text_ahead(found)]
    for kind, them in found["devices"].items():
        lines.append(f"{kind}: {len(them)} × {them[0]}")
    lines.append(f"attention of {found['model']} in {found['dtype']} on {found['device']}:")
    for row in found["attention"]:
        mark = "→" if row["name"] == found["chosen"] else " "
        says = row["problem"] or (
            f"{row['difference']:.2g} from the reference, {row['seconds'] * 1e3:.1f} ms for a small batch"
        )
        lines.append(f"{mark} {row['name']:<11} {says}")
    return lines


def _text_ahead(found: dict[str, Any]) -> list[str]:
    lines = [
        f"{found['model']} in {found['dtype']} on one {found['device']} with {found['hbm_bytes'] / 2**30:.0f} GiB, "
        f"attention {found['chosen']}"
        + "".join(f"; not {row['name']}: {row['problem']}" for row in found["attention"]),
        "  batch    fits    HBM MiB  temporary  attention cycles  million tokens/s  model FLOPs",
    ]
    for row in found["shapes"]:
        shape = f"{row['B']}×{row['T']}"
        if row["problem"] is not None:
            lines.append(f"{shape:>9}  no   {row['problem']}")
            continue
        cycles = "-" if row["attention_cycles"] is None else f"{row['attention_cycles']:,}"
        lines.append(
            f"{shape:>9}  yes {row['hbm_bytes'] / MIB:>10,.0f} {row['temporary_bytes'] / MIB:>10,.0f} {cycles:>17} "
            f"{row['tokens_per_second'] / 1e6:>17.2f} {row['utilisation']:>12.0%}"
        )
        if row["not_counted"] is not None:
            lines.append(f"           without the attention's cycles: {row['not_counted']}")
    lines.append("Cycles, and what follows from them, are those of the compiler's plan: on a real chip expect 10 to 30 % less speed.")  # fmt: skip
    return lines
