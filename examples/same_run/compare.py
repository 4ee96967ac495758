"""One configuration, one seed, one loss curve: the same run on one process, under DDP, FSDP, ZeRO, MPI and XLA SPMD.

    pip install '.[mpi,deepspeed,plot]'
    python examples/same_run/compare.py                     # all that can run here: a table, and same-run.png
    python examples/same_run/compare.py ddp fsdp --steps 10 # the set-ups whose names begin so
    python examples/same_run/compare.py --xla-python .venv-xla/bin/python   # XLA needs its own environment

Each set-up is `lockstep-train` with another strategy and other devices, on 101 samples in global batches of 8: the last
step of an epoch has 5. After each step 13 other samples are evaluated; see docs/same-run.md.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

#: What all runs share: data, model, seed, and the samples of an optimizer step.
SAME = [
    "data=own",
    "data._target_=odd_samples.OddSamples",
    "+data.context=64",
    "model=byte_gpt",
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


def evaluations(name: str, steps: int, folder: Path, python: str) -> list[tuple[float, float]]:
    """Run a set-up, unless its run is there; return the loss and the accuracy after each optimizer step."""
    written = folder / "csv" / "metrics.csv"
    if not written.exists():
        command = [python, "-m", "lightning_lockstep.train", *SAME, *SETUPS[name]]
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
        return [
            (float(row["val_loss"]), float(row["val_acc"])) for row in csv.DictReader(file) if row["val_loss"]
        ]


def table(found: dict[str, list[tuple[float, float]]]) -> str:
    """Return the evaluations as a table of Markdown: some, and the largest difference from the first curve."""
    reference = next(iter(found.values()))
    shown = sorted({0, len(reference) // 2 - 1, len(reference) - 1})
    lines = [
        "| set-up |"
        + "".join(f" loss after step {step + 1} |" for step in shown)
        + " accuracy | largest difference |",
        "| --- |" + " --- |" * (len(shown) + 2),
    ]
    for name, values in found.items():
        apart = max(abs(one[0] - other[0]) for one, other in zip(values, reference, strict=True))
        losses = "".join(f" {values[step][0]:.7f} |" for step in shown)
        lines.append(f"| {name} |{losses} {values[-1][1]:.7f} | {apart:.1e} |")
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
    above.set_ylabel("loss of 13 other samples")
    above.legend(fontsize="small")
    below.set(ylabel=f"difference from {next(iter(curves))}", xlabel="optimizer step", ylim=(1e-8, 1e-4))
    below.xaxis.get_major_locator().set_params(integer=True)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    """Run the set-ups, print the table and draw the picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="beginnings of names; the first set-up always runs")
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
            if name.startswith("xla") and not given.xla_python:
                print(f"{name}: left out, without --xla-python", file=sys.stderr)
                continue
            print(name, file=sys.stderr, flush=True)
            python = given.xla_python if name.startswith("xla") else sys.executable
            try:
                found[name] = evaluations(
                    name, given.steps, (folder / name.replace(", ", "-").replace(" ", "-")).absolute(), python
                )
            except RuntimeError as error:  # the others still count
                failed.append(name)
                print(error, file=sys.stderr)
    print(table(found))
    draw({name: [loss for loss, _ in values] for name, values in found.items()}, given.picture)
    print(f"drawn: {given.picture}", file=sys.stderr)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
