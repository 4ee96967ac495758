"""Each snippet of the pages runs, or is checked as far as it can be without what it needs.

Python that only makes objects runs in one process, one after the other; what fits or starts ranks gets one of its own.
A `lockstep-train` line is checked as the command itself does before it starts anything; that of a project of the
examples is composed by Hydra. What needs what no test has is left out: `<!-- not run: the reason -->` is above it on
the page, or `why_not` knows the reason.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.utils import _locate
from hydra.errors import HydraException
from repository import PAGES, ROOT


def problems() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        readers_folder(Path(folder))
        yield from python(Path(folder))
        with as_a_reader(Path(folder)):
            for command in COMMANDS:
                if not why_not(command):
                    yield from wrong_with(command)
            for cell, part in SHELL_CELLS:
                if not why_not(cell):
                    yield from wrong_with(cell, part)
    for block in DATA:
        yield from wrong_with_data(block)


# -- What is on a page --

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
MARK = re.compile(r"<!-- not run: (.*?) -->\s*$", re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """A block of a page; of one with commands a line."""

    page: str
    line: int
    language: str
    text: str
    not_run: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Snippet]:
    text = page.read_text()
    blocks = []
    for found in FENCE.finditer(text):
        mark = MARK.search(text[: found.start()])
        line = text[: found.start("text")].count("\n") + 1
        name = str(page.relative_to(ROOT))
        blocks.append(Snippet(name, line, found["language"], found["text"], mark[1] if mark else ""))
    return blocks


def commands_of(block: Snippet) -> list[Snippet]:
    """The lines of a block of commands, without comments; what a backslash joins is one."""
    lines = []
    for number, line in enumerate(re.sub(r" *\\\n *", " ", block.text).splitlines(), block.line):
        if line.strip() and not line.lstrip().startswith("#"):
            lines.append(Snippet(block.page, number, "bash", line.strip(), block.not_run))
    return lines


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
COMMANDS = [line for block in BLOCKS if block.language == "bash" for line in commands_of(block)]
DATA = [block for block in BLOCKS if block.language in ("yaml", "toml", "json")]


# -- Python --

#: Names that pages take for granted, and what stands for them here.
GIVEN = {
    "L": "import lightning as L",
    "Trainer": "from lightning import Trainer",
    "torch": "import torch",
    "lightning_lockstep": "import lightning_lockstep",
    "MyModel": "from lightning_lockstep.demo import ConvNet as MyModel",
    "model": "from lightning_lockstep.demo import ConvNet\nmodel = ConvNet(width=8)",
    "module": "from lightning_lockstep.demo import ConvNet\nmodule = ConvNet(width=8)",
    "data": "from lightning_lockstep.demo import DigitsData\ndata = DigitsData(batch_size=512)",
    "trainer": "import lightning as _L\ntrainer = _L.Trainer(max_epochs=1, accelerator='cpu', logger=False, "
    "enable_checkpointing=False, enable_progress_bar=False, limit_val_batches=1)",
    "rank": "rank = 0",
    "size": "size = 1",
    "store": "import torch as _torch\nstore = _torch.distributed.HashStore()",
    "loss": "import torch as _torch\nloss = _torch.zeros(())",
    "everyone": "import torch as _torch\neveryone = [_torch.zeros(2, 5), _torch.zeros(7, 5)]",
    "self": "import types as _types, torch as _torch\nself = _types.SimpleNamespace(head=_torch.nn.Linear(5, 1))",
}


def missing_names(text: str) -> list[str]:
    """Names that a snippet uses before it makes them, or never makes."""
    missing: set[str] = set()
    known = {*dir(builtins), "__name__", "__file__"}
    for statement in ast.parse(text).body:
        nodes = list(ast.walk(statement))
        names = [node for node in nodes if isinstance(node, ast.Name)]
        made = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
        made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        made |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        imports = (node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)))
        made |= {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
        inside = set() if isinstance(statement, (ast.Assign, ast.AugAssign)) else made
        missing |= {node.id for node in names if isinstance(node.ctx, ast.Load)} - known - inside
        known |= made
    return sorted(missing)


def program_of(snippet: Snippet) -> str:
    given = [GIVEN[name] for name in missing_names(snippet.text) if name in GIVEN]
    return "\n".join([*given, snippet.text])


#: Threads of several programs would wait for each other.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
#: What fits, starts ranks or a group of ranks, or may end the process, gets one of its own.
ALONE = re.compile(r"\.(fit|test)\(|notebook_launcher\(|hydra_main|init_process_group\(|set_breakpoint\(")
RUNS = [snippet for snippet in PYTHON if not snippet.not_run]

# One after the other, each with names of its own; what it leaves behind in the process is put back.
OBJECTS = """
import json, os, sys, traceback, warnings
environment, failed = dict(os.environ), {}
for name, text in json.load(open(sys.argv[1])).items():
    try:
        with warnings.catch_warnings():
            exec(compile(text, name, "exec"), {"__name__": "__main__"})
    except BaseException:
        failed[name] = traceback.format_exc()
    os.environ.clear()
    os.environ.update(environment)
sys.stdout.write("\\n" + json.dumps(failed))
"""


def python(folder: Path) -> Iterator[str]:
    """What makes objects runs in one process, what fits or starts ranks in one of its own; the rest is compiled."""
    programs = {str(snippet): program_of(snippet) for snippet in RUNS if not ALONE.search(snippet.text)}
    programs["docs/coming-from.md"] = program_of_cells()
    (folder / "programs.json").write_text(json.dumps(programs))
    printed = run(OBJECTS, folder, "programs.json")
    if printed.returncode:
        yield f"scripts/checks/snippets.py: the snippets that make objects end their process: {printed.stderr}"
    else:
        failed = json.loads(printed.stdout.splitlines()[-1])
        yield from (f"{name}: does not run:\n{error}" for name, error in failed.items())
    for snippet in PYTHON:
        if snippet.not_run:
            compile(snippet.text, str(snippet), "exec")
        elif ALONE.search(snippet.text):
            printed = run(program_of(snippet), folder)
            if printed.returncode:
                yield f"{snippet}: does not run:\n{printed.stderr}"


def run(program: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    command = [sys.executable, "program.py", *arguments]
    environment = {**os.environ, **ONE_THREAD}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


# -- Commands --

EMPTY_ARCHIVE = "PK\5\6" + 18 * "\0"  # as far as a look from outside tells, a checkpoint
READERS_FILES = {
    "mine.py": "from lightning_lockstep.demo import ConvNet, DigitsData\n\n\nclass Net(ConvNet):\n"
    "    def __init__(self, width: int = 8) -> None:\n        super().__init__(width=width)\n\n\n"
    "class Data(DigitsData):\n    pass\n",
    "my_conf/experiment/mine.yaml": "# @package _global_\ntrainer:\n  max_epochs: 1\n",
    "conf/config.yaml": "defaults: [lockstep_train, _self_]\ntrainer: {fast_dev_run: true}\n"
    "hydra: {searchpath: [pkg://lightning_lockstep.conf]}\n",
    "hosts": "node1 slots=4\nnode2 slots=4\n",
    "RUN/checkpoints/last.ckpt": EMPTY_ARCHIVE,
    "RUN/checkpoints/last.consolidated.ckpt": EMPTY_ARCHIVE,
    "ds_config.json": '{"zero_optimization": {"stage": 2}}',
}
#: Programs that no test starts as a page has them, and why.
NOT_HERE = {
    "scontrol": "needs Slurm",
    "srun": "needs Slurm, and a program of the reader",
    "python3": "makes an environment",
    ".": "makes an environment",
    "git": "asks another host",
    "docker": "needs an image",
}
#: Arguments that ask for a GPU, or run the doctor for a machine that the page imagines.
ELSEWHERE = {"trainer.accelerator=gpu", "debug=preflight"}
PROGRAMS = ("lockstep-train", "lockstep-doctor", "lockstep-consolidate")
MODULES = {"lightning_lockstep.train": "lockstep-train", "lightning_lockstep.doctor": "lockstep-doctor"}


def readers_folder(folder: Path) -> None:
    for name, text in READERS_FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@contextlib.contextmanager
def as_a_reader(folder: Path) -> Iterator[None]:
    """Be in a folder with what readers have, where a command finds it."""
    before, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path


def parts_of(line: str) -> tuple[str, list[str]]:
    """The program of a command line with its arguments, without variables and without what starts its ranks."""
    tokens = [token for token in shlex.split(line, comments=True) if token != "..."]
    while tokens and re.fullmatch(r"[A-Z_]+=.*", tokens[0]):
        tokens.pop(0)
    for place, token in enumerate(tokens):
        if token.rpartition("/")[2] in PROGRAMS:
            return token.rpartition("/")[2], tokens[place + 1 :]
        if token == "-m" and tokens[place + 1] in MODULES:
            return MODULES[tokens[place + 1]], tokens[place + 2 :]
    if tokens[0] == "torchrun":
        return "python", tokens[tokens.index("train.py") :]
    return tokens[0], tokens[1:]


def why_not(command: Snippet) -> str:
    """Return why a command is not tried, if it is not."""
    program, arguments = parts_of(command.text)
    if command.not_run or program in NOT_HERE:
        return command.not_run or NOT_HERE[program]
    if program == "python" and not (project_of(command) or arguments[0].startswith("examples/")):
        return "takes minutes" if arguments[0] == "-m" else "a program of the reader"
    return ""


def project_of(command: Snippet) -> Path | None:
    """The project among the examples of which a line starts the program."""
    folder = ROOT / ("examples/foreign_app" if command.page == "docs/hydra.md" else Path(command.page).parent)
    is_its_own = parts_of(command.text)[1][:1] == ["train.py"]
    return folder if is_its_own and folder.is_relative_to(ROOT / "examples") else None


def first_job(arguments: list[str]) -> list[str]:
    """The arguments of the first job of a sweep, without who launches it."""
    plain = [word for word in arguments if word != "-m" and not word.startswith("hydra")]
    return [re.sub(r"=interval\(([^,]*),.*|=([^\[{,]*),.*", r"=\1\2", word) for word in plain]


def compose_in(project: Path, arguments: list[str]) -> None:
    words = [word for word in first_job(arguments) if not word.startswith("ckpt_path=")]
    with initialize_config_dir(str(project / "conf"), version_base="1.3"):
        compose("config", words)


def wrong_with(command: Snippet, part: str = "") -> Iterator[str]:
    """Return what is wrong with a command, or with overrides in a table of docs/coming-from.md."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        error = error_of(command, part)
    if error is not None:
        yield f"{command}: {command.text} cannot be given: {type(error).__name__}: {error}"


def error_of(command: Snippet, part: str) -> Exception | None:
    try:
        if part and kind_of(command.text) == "overrides":
            words = shlex.split(command.text)
            if part == "lightning-hydra-template" and not command.text.startswith("ckpt_path"):
                compose_in(ROOT / "examples" / "foreign_app", words)
            else:
                faults = faults_of(*words)
                assert not faults, faults
        elif (project := project_of(command)) is None:
            look_at(command, *parts_of(command.text))
        else:
            is_refused = False
            try:
                compose_in(project, parts_of(command.text)[1][1:])
            except HydraException:
                is_refused = True
            assert is_refused == ("exit code 2" in command.text)
    except Exception as error:
        return error
    return None


def faults_of(*arguments: str) -> list[str]:
    """What `lockstep-train` finds wrong with these arguments before it starts anything."""
    configs = importlib.import_module("lightning_lockstep._application.configs")
    overrides = importlib.import_module("lightning_lockstep._application.overrides")
    checks = importlib.import_module("lightning_lockstep._application.checks")
    main = importlib.import_module("lightning_lockstep.train").main
    parsed = overrides.read_arguments(list(arguments))
    search_path = configs.search_path_of(main, "pkg://lightning_lockstep.conf", parsed)
    found: list[str] = overrides.check_command_line(
        parsed, search_path, "lockstep_train", checks.check_training, alone=True
    )[0]
    return found


def look_at(command: Snippet, program: str, arguments: list[str]) -> None:
    """Check what starts nothing, or no Python of ours."""
    if program == "lockstep-train":
        # What the command itself finds out before it starts anything; a sweep's first job stands for all.
        faults = faults_of(*(word for word in first_job(arguments) if word not in ELSEWHERE))
        assert not faults, faults
    elif program == "lockstep-doctor":
        from lightning_lockstep.doctor.command import read

        read(arguments)
    elif program == "lockstep-consolidate":
        from lightning_lockstep.deepspeed.checkpoints.command import main

        # The arguments are read; then the folders that are not there are named.
        assert main(arguments) == 2
    elif program == "python" and arguments[0].startswith("examples/"):
        # tests/programs/application/test_examples.py and others run them.
        source = (ROOT / arguments[0]).read_text()
        assert [word for word in arguments if word.startswith("--") and f'"{word}"' not in source] == []
    elif program == "pip":
        extras = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        named = re.findall(r"(?:lightning-lockstep|\.)\[([\w,-]+)\]", command.text)
        assert {*",".join(named).split(",")} - {""} <= {*extras}
    elif program == "export":
        done = subprocess.run(["bash", "-ec", command.text], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert program.startswith("scripts/"), f"nothing here knows how to check {program!r}"
        assert (ROOT / program).stat().st_mode & 0o100


# -- Tables of what to write --


def cells_to_write() -> list[tuple[Snippet, str]]:
    """What the right columns of docs/coming-from.md have in backquotes, and the part of the page it is in."""
    page, part, found = ROOT / "docs" / "coming-from.md", "", []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        part = line.removeprefix("## ") if line.startswith("## ") else part
        if line.startswith("| ") and not line.startswith(("| you have", "| ---")):
            cell = line.rsplit(" | ", 1)[1]
            found += [(Snippet("docs/coming-from.md", number, "", text), part) for text in re.findall("`(.+?)`", cell)]
    return found


def kind_of(text: str) -> str:
    """How what stands in such a cell is checked."""
    if text.split()[0] in PROGRAMS:
        return "command"
    if re.match(r"[+~]?[a-z][\w/]*(@[\w.]+)?[\w.]*=[^\"]*$", text) and not re.fullmatch(r"\w+=(\d+|)", text):
        return "overrides"
    with contextlib.suppress(SyntaxError):
        if isinstance(ast.parse(text.removeprefix("@")).body[0], (ast.Import, ast.ImportFrom)):
            return "python"
        expression = ast.parse(text.removeprefix("@"), mode="eval").body
        if isinstance(expression, ast.Call) and not text.startswith("self."):
            return "python"
        if isinstance(expression, ast.Constant) and str(expression.value).startswith("lockstep_"):
            return "strategy"
    return "words"


CELLS = cells_to_write()
SHELL_CELLS = [found for found in CELLS if kind_of(found[0].text) in ("command", "overrides")]


def without_dots(text: str) -> str:
    """An expression without the arguments that are `...`; a call that has no others is the name that it calls."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    left_out = [node for node in arguments if isinstance(node, ast.Constant) and node.value is ...]
    call.args = [argument for argument in call.args if argument not in left_out]
    call.keywords = [keyword for keyword in call.keywords if keyword.value not in left_out]
    return ast.unparse(call.func if left_out and not call.args and not call.keywords else call)


def program_of_cells() -> str:
    """What users of other packages are to write in Python, a line each."""
    lines = ["from lightning_lockstep import *", "from lightning_lockstep.train import hydra_main"]
    lines += [GIVEN["trainer"], GIVEN["model"], GIVEN["module"], GIVEN["Trainer"]]
    for cell, _ in CELLS:
        text, kind = cell.text.removeprefix("@"), kind_of(cell.text)
        if "XLA" in text or "scale_batch_size" in text:
            continue  # another environment; docs/batch-size.md has it with data
        if kind == "python":
            lines.append(f"{text if text.startswith(('import', 'from')) else without_dots(text)}  # {cell}")
        elif kind == "strategy":
            lines.append(f"Trainer(strategy={text}, accelerator='cpu')  # {cell}")
    return "\n".join(lines)


# -- Configuration --


def wrong_with_data(block: Snippet) -> Iterator[str]:
    """Return what of a file cannot be read, and which of its names are not there."""
    try:
        if block.language == "toml":
            importlib.import_module("tomllib").loads(block.text)  # Python 3.11
            return
        assert list(yaml.safe_load_all(block.text)) != [None]
        for name in re.findall(r"(?:_target_|class_path): (lightning_lockstep\S+)", block.text):
            assert callable(_locate(name)), name
    except ModuleNotFoundError:
        return
    except Exception as error:
        yield f"{block}: cannot be read, or has a name that is not there: {type(error).__name__}: {error}"
