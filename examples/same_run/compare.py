"""One configuration, one seed, one loss curve: the same run on one process, under DDP, FSDP, ZeRO, MPI and XLA SPMD.

    pip install '.[mpi,deepspeed,plot]'
    python examples/same_run/compare.py                     # all that can run here: a table, and same-run.png
    python examples/same_run/compare.py ddp fsdp --steps 10 # the set-ups whose names begin so
    python examples/same_run/compare.py --model cnn         # augmentation, batch norm, dropout
    python examples/same_run/compare.py --xla-python .venv-xla/bin/python   # XLA needs its own environment

Each set-up is `lockstep-train` with another strategy and other devices, on 101 samples in global batches of 8 (the last
step of an epoch has 5), or on digits. After each step other samples are evaluated; see docs/same-run.md.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

#: What all runs share.
SAME = [
    "seed=1",
    "precision=32-true",
    "trainer.accelerator=cpu",
    "trainer.val_check_interval=1",
    "trainer.num_sanity_val_steps=0",
    "trainer.enable_progress_bar=false",
    "callbacks=none",
    "checkpoint=none",
    "logger=csv",
    "validate=false",
    "test=false",
]
#: What they train. With augmentation, batch norm and dropout, one process also needs a strategy of this package.
MODELS = {
    "byte_gpt": ["data=own", "data._target_=odd_samples.OddSamples", "+data.context=64", "model=byte_gpt"],
    "cnn": [
        "data=digits",
        "data.augment=true",
        "data.global_batch_size=64",
        "model=cnn",
        "model.norm=batch",
        "model.dropout=0.2",
        "strategy.random_numbers=of_sample",
        "strategy.batch_norm=of_batch",
    ],
}
#: In what they differ, by name.
SETUPS = {
    "one process": ["strategy=single"],
    "ddp, 2 ranks": ["strategy=ddp", "trainer.devices=2"],
    "fsdp, 2 ranks": ["strategy=fsdp", "trainer.devices=2"],
    "fsdp, 4 ranks": ["strategy=fsdp", "trainer.devices=4"],
    "fsdp, 4 ranks, no reshard": [
        "strategy=fsdp",
        "trainer.devices=4",
        "strategy.reshard_after_forward=false",
    ],
    "fsdp, 4 ranks, 2 x 2": ["strategy=fsdp", "trainer.devices=4", "strategy.mesh={shard: 2, replicate: 2}"],
    "deepspeed, stage 1, 2 ranks": ["strategy=deepspeed_stage_1", "trainer.devices=2"],
    "deepspeed, stage 2, 2 ranks": ["strategy=deepspeed_stage_2", "trainer.devices=2"],
    "deepspeed, stage 3, 2 ranks": ["strategy=deepspeed_stage_3", "trainer.devices=2"],
    "mpi, 2 ranks": ["strategy=mpi", "trainer.devices=2"],
    "xla spmd, 4 devices": ["strategy=xla_spmd", "trainer.devices=4"],
}


def evaluations(name: str, model: str, steps: int, folder: Path, python: str) -> list[float]:
    """Run a set-up, unless its run is there; return the loss after each optimizer step."""
    written = folder / "csv" / "metrics.csv"
    if not written.exists():
        where = ["strategy=ddp", "trainer.devices=1"] if (model, name) == ("cnn", "one process") else SETUPS[name]
        command = [python, "-m", "lightning_lockstep.train", *SAME, *MODELS[model], *where]
        command += [f"trainer.max_steps={steps}", f"hydra.run.dir={folder}"]
        done = subprocess.run(
            command,
            cwd=Path(__file__).parent,  # where odd_samples.py is
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{name} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    with open(written, newline="") as file:
        return [float(row["val_loss"]) for row in csv.DictReader(file) if row["val_loss"]]


def table(found: dict[str, list[float]]) -> str:
    """Return a table of Markdown: the last losses, and the largest differences from the first curve."""
    reference = next(iter(found.values()))
    lines = [
        f"| set-up | loss after step {len(reference)} | largest difference |",
        "| --- | --- | --- |",
    ]
    for name, values in found.items():
        apart = max(abs(one - other) for one, other in zip(values, reference, strict=True))
        lines.append(f"| {name} | {values[-1]:.7f} | {apart:.1e} |")
    return "\n".join(lines)


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Draw all curves over each other, and below how far each is from the first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(8, 7), height_ratios=[3, 2])
    colours = pyplot.get_cmap("tab20")
    reference = next(iter(curves.values()))
    for index, (name, values) in enumerate(curves.items()):
        steps = range(1, len(values) + 1)
        above.plot(steps, values, label=name, linewidth=len(curves) + 1 - index, color=colours(index))
        apart = [max(abs(one - other), 1e-8) for one, other in zip(values, reference, strict=True)]
        if index:
            below.semilogy(steps, apart, color=colours(index))
    below.axhline(1e-5, color="black", linestyle="dashed")
    above.set_ylabel("loss of other samples")
    above.legend(fontsize="small")
    below.set(ylabel=f"difference from {next(iter(curves))}", xlabel="optimizer step", ylim=(1e-8, 1e-4))
    below.xaxis.get_major_locator().set_params(integer=True)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    """Run the set-ups, print the table and draw the picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="beginnings of names; the first set-up always runs")
    parser.add_argument("--model", default="byte_gpt", choices=list(MODELS), help="cnn has batch norm and dropout")
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--picture", type=Path, default=Path("same-run.png"))
    parser.add_argument("--runs", type=Path, help="folder for the runs; one that is there is not run again")
    parser.add_argument("--xla-python", help="interpreter of an environment with torch-xla")
    given = parser.parse_args()
    chosen = [
        name
        for index, name in enumerate(SETUPS)
        if index == 0 or not given.names or name.startswith(tuple(given.names))
    ]
    found, failed = {}, list[str]()
    with tempfile.TemporaryDirectory() as temporary:
        for name in chosen:
            folder = given.runs or Path(temporary)
            if name.startswith("xla") and (not given.xla_python or given.model == "cnn"):
                print(f"{name}: left out; it needs --xla-python and --model byte_gpt", file=sys.stderr)
                continue
            print(name, file=sys.stderr, flush=True)
            python = given.xla_python if name.startswith("xla") else sys.executable
            try:
                path = (folder / f"{given.model}-{name.replace(', ', '-').replace(' ', '-')}").absolute()
                found[name] = evaluations(name, given.model, given.steps, path, python)
            except RuntimeError as error:  # the others still count
                failed.append(name)
                print(error, file=sys.stderr)
    print(table(found))
    draw(found, given.picture)
    print(f"drawn: {given.picture}", file=sys.stderr)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
