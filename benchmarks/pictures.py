"""Run small jobs and make the pictures of the documentation from what they print: ``scripts/pictures [name ...]``.

A screen is what stands on a terminal of 80 columns at the end of a run, drawn by rich; a plot is a PNG that a run
wrote. The runs are real: only paths of this machine are replaced.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from benchmarks.bench_failures import printed, train
from benchmarks.bench_recovery import train as train_and_kill
from benchmarks.terminal import COLUMNS, Shown, run_in_terminal, without_colours

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "pictures"
BIN = Path(sys.executable).parent
LIMIT = 600.0  # seconds for a job
TRAIN = ["data=digits", "model=cnn", "strategy=ddp", "trainer.devices=2"]
# Emoji, which fonts of terminals draw as an empty square.
_IN_NO_FONT = re.compile("[\U0001f000-\U0001ffff\ufe0f]")
_FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


# -- Screens --


def draw(lines: Sequence[str], title: str, name: str) -> str:
    """An SVG of lines with ANSI codes, wrapped between words at 80 columns; it needs no font from elsewhere."""
    console = _console()
    # The last row is cut where a font is deeper than rich's: so it is an empty one.
    texts = [without_colours(line).strip() for line in lines]
    rows = max((number for number, text in enumerate(texts, 1) if text), default=0)
    for line in [*lines[:rows], ""]:
        console.print(Text.from_ansi(_IN_NO_FONT.sub("", line)), highlight=False)
    picture = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    picture = picture.replace("Fira Code, monospace", _FONTS)
    return console.export_svg(title=title, code_format=picture, unique_id=name)


def _console() -> Console:
    return Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, legacy_windows=False)


def last_rows(shown: Shown, rows: int) -> list[str]:
    """The last rows that a terminal shows, from a line's beginning on."""
    lines, taken = list(shown.lines), 0
    while lines and not without_colours(lines[-1]).strip():
        lines.pop()
    for number, line in enumerate(reversed(lines)):
        taken += len(Text.from_ansi(line).wrap(_console(), COLUMNS))
        if taken > rows:
            return lines[len(lines) - number :]
    return lines


def stacked(pictures: Sequence[str], gap: int = 12) -> str:
    """One SVG of several, below each other."""
    top, parts, width = 0.0, [], 0.0
    for picture in pictures:
        size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture)
        assert size is not None
        place = f'<svg x="0" y="{top}" width="{size[1]}" height="{size[2]}"'
        parts.append(picture.replace("<svg", place, 1))
        top, width = top + float(size[2]) + gap, max(width, float(size[1]))
    size_of_all = f'viewBox="0 0 {width} {top - gap}"'
    return f'<svg {size_of_all} xmlns="http://www.w3.org/2000/svg">\n' + "\n".join(parts) + "\n</svg>\n"


def in_folder(command: Sequence[str], *, script: str = "", keep: str = "") -> tuple[Shown, bytes]:
    """Run a command in a folder with one script; what it showed, and the file that matches ``keep``."""
    folder = Path(tempfile.mkdtemp(prefix="pictures-"))
    try:
        if script:
            shutil.copy(ROOT / script, folder / Path(command[1]).name)
        shown = run_in_terminal(command, folder=folder, limit=LIMIT)
        found = sorted(folder.glob(keep)) if keep else []
        if keep and not found:
            raise RuntimeError(f"{' '.join(command)} left no {keep}:\n" + "\n".join(printed(shown)))
        return shown, found[0].read_bytes() if found else b""
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def from_line(lines: Sequence[str], beginning: str) -> list[str]:
    """The lines from the first one on that begins so."""
    texts = [without_colours(line).strip() for line in lines]
    first = next((at for at, text in enumerate(texts) if text.startswith(beginning)), None)
    if first is None:
        raise RuntimeError(f"no line begins with {beginning!r}:\n" + "\n".join(texts))
    return list(lines[first:])


# -- The pictures --


def failing_rank(folder: Path) -> None:
    """The last lines of a run whose rank 1 raises: Lightning's ddp, and ours."""
    pictures = []
    for strategy in ("ddp", "lockstep_ddp"):
        shown, _ = train("raise", strategy, limit=LIMIT)
        program = [f'trainer = L.Trainer(accelerator="cpu", devices=2, strategy="{strategy}")', ""]
        if strategy != "ddp":
            program.insert(0, "import lightning_lockstep")
        title = f"{strategy}: the last of {len(printed(shown))} lines"
        pictures.append(draw([*program, *last_rows(shown, 12)], title, f"failing-{strategy}"))
    (folder / "failing-rank.svg").write_text(stacked(pictures))


def stall(folder: Path) -> None:
    """A rank that never comes to the gradients' all-reduce."""
    shown, _ = train("never", "lockstep_ddp", limit=LIMIT, options=("--stall-timeout", "10"))
    lines = from_line(shown.lines, "lightning_lockstep.errors.CollectiveStallError")
    (folder / "stall.svg").write_text(draw(lines, "rank 1 never comes; stall_timeout=10", "stall"))


def first_run(folder: Path) -> None:
    """The demo: the table of ranks, progress, and the result."""
    shown, _ = in_folder([str(BIN / "lockstep-train"), *TRAIN, "trainer.max_epochs=8"])
    lines = [
        "$ lockstep-train data=digits model=cnn strategy=ddp trainer.devices=2 \\",
        "    trainer.max_epochs=8",
    ]
    (folder / "first-run.svg").write_text(draw([*lines, *shown.lines], "two ranks, two CPU cores", "first-run"))


def overflow_plot(folder: Path) -> None:
    """The picture that the detector draws; the run's learning rate is far too large for float16."""
    options = ["precision=16-mixed", "debug=overflow", "model.learning_rate=30", "model.warmup_steps=200"]
    _, png = in_folder([str(BIN / "lockstep-train"), *TRAIN, *options], keep="outputs/**/*.png")
    (folder / "overflow.png").write_bytes(png)


def doctor(folder: Path) -> None:
    """The table of lockstep-doctor."""
    shown, _ = in_folder([str(BIN / "lockstep-doctor"), "kernel", "mpi", "deepspeed"])
    lines = ["$ lockstep-doctor kernel mpi deepspeed", *shown.lines]
    (folder / "doctor.svg").write_text(draw(lines, "lockstep-doctor", "doctor"))


RANKS = range(1, 7)


def by_ranks(script: str, *, all_at_once: bool = False) -> dict[str, list[list[float]]]:
    """Return the figures that a script of examples/same_run prints on 1 to 6 ranks, by strategy."""
    found: dict[str, list[list[float]]] = {}
    for strategy in ("ddp", "lockstep_ddp"):
        for numbers in [[*RANKS]] if all_at_once else [[number] for number in RANKS]:
            command = [
                sys.executable,
                Path(script).name,
                "--strategy",
                strategy,
                "--ranks",
                *map(str, numbers),
            ]
            shown = in_folder(command, script=f"examples/same_run/{script}")[0]
            for number in numbers:
                (line,) = from_line(shown.lines, f"{strategy} on {number}: ")[:1]
                figures = [float(one) for one in re.findall(r"\d+\.\d+", without_colours(line))]
                found.setdefault(strategy, []).append(figures)
    return found


def draw_by_ranks(panel: Any, found: dict[str, list[list[float]]], index: int, what: str) -> None:
    """Draw one of those figures over the ranks."""
    for (strategy, values), colour, marker in zip(found.items(), ("tab:red", "tab:blue"), "so", strict=True):
        figures = [one[index] for one in values]
        panel.plot(RANKS, figures, color=colour, marker=marker, label=strategy, linewidth=2)
    panel.set(xlabel="ranks", ylabel=what, xticks=RANKS)
    panel.spines[["top", "right"]].set_visible(False)
    panel.margins(y=0.15)


def any_ranks(folder: Path) -> None:
    """A test of 13 samples on 1 to 6 ranks: Lightning's ddp, and ours."""
    from matplotlib.figure import Figure

    figure, found = Figure(figsize=(8, 3.2), layout="constrained"), by_ranks("any_ranks.py")
    figure.suptitle("One model, 13 test samples in batches of 4", fontsize=11)
    panels = figure.subplots(1, 2)
    for index, what in enumerate(("test accuracy", "test loss")):
        draw_by_ranks(panels[index], found, index, what)
    panels[0].legend(frameon=False, loc="upper right")
    figure.savefig(folder / "any-ranks.png", dpi=130)


def real_model(folder: Path) -> None:
    """A residual network with augmentation, batch norm and dropout on 1 to 6 ranks: Lightning's ddp, and ours."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    figure.suptitle("A residual network with augmentation, batch norm and dropout, global batch 60", fontsize=11)
    panel = figure.subplots()
    draw_by_ranks(panel, by_ranks("real_model.py", all_at_once=True), 0, "test accuracy")
    panel.legend(frameon=False, loc="best")
    figure.savefig(folder / "real-model.png", dpi=130)


def lost_ranks(folder: Path) -> None:
    """The loss of a fit on 4 ranks of which two are killed, beside the undisturbed one and torchrun's restart."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    figure.suptitle("200 steps on 4 ranks; a rank is killed in step 60, another one in step 130", fontsize=11)
    panel = figure.subplots()
    runs = {
        "torchrun --max-restarts, a checkpoint every 50 steps": ("torchrun", "2@60,0@130", "tab:red", "-"),
        "on_lost_rank='continue'": ("ours", "2@60,0@130", "tab:blue", "-"),
        "nobody is killed": ("ours", "", "black", ":"),
    }
    for name, (mode, kills, colour, style) in runs.items():
        steps = train_and_kill(mode, kills).steps
        seconds = [at - steps[0][0] for at, _, _ in steps]
        losses = [loss for _, _, loss in steps]
        panel.plot(seconds, losses, color=colour, linestyle=style, label=name, linewidth=2)
    panel.set(xlabel="seconds since the first step", ylabel="loss of the same 128 samples", yscale="log")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, loc="best")
    figure.savefig(folder / "lost-ranks.png", dpi=130)


PICTURES: dict[str, Callable[[Path], None]] = {
    "failing-rank": failing_rank,
    "stall": stall,
    "first-run": first_run,
    "overflow-plot": overflow_plot,
    "doctor": doctor,
    "any-ranks": any_ranks,
    "real-model": real_model,
    "lost-ranks": lost_ranks,
}


def main() -> int:
    """Make the pictures that the command line names, or all."""
    names = "\n".join(f"  {name:14} {(made.__doc__ or '').splitlines()[0]}" for name, made in PICTURES.items())
    parser = argparse.ArgumentParser(
        prog="scripts/pictures",
        description="Run small jobs and draw what they print.\n" + names,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], metavar="name", help="which (default: all)")
    parser.add_argument("--to", type=Path, default=TARGET, help="folder (default: docs/pictures)")
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    for name in given.names or PICTURES:
        print(f"{name} ...", flush=True)
        PICTURES[name](given.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
