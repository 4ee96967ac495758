"""Every snippet of the pages runs, or is checked as far as it can be without what it needs.

Python runs as a program, forked from one that has imported Lightning. Of command lines those that take seconds run; a
`lockstep-train` line is checked as the command itself does before it starts anything. A snippet that needs what no test
has is preceded by `<!-- not run: the reason -->`; `pytest -rs` lists what did not run, with the reason.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from lightning_lockstep._doors.hydra_internals import locate
from tests.common.application.command_lines import faults_of
from tests.helpers import run_script

ROOT = Path(__file__).parents[3]
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
]
LANGUAGES = {"python", "bash", "yaml", "toml", "text", "json"}

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


def test_every_block_has_a_language() -> None:
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_code_stands_indented_without_a_fence(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    assert re.findall(r"(?:^|\n)(?![ \t]*[-*\d])\S[^\n]*\n\n    (\S.*)", text) == []


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


@pytest.mark.parametrize("snippet", PYTHON, ids=str)
def test_python_runs(snippet: Snippet, tmp_path: Path) -> None:
    if snippet.not_run:
        compile(snippet.text, str(snippet), "exec")
        pytest.skip(snippet.not_run)
    given = [GIVEN[name] for name in missing_names(snippet.text) if name in GIVEN]
    program = tmp_path / "snippet.py"
    program.write_text("\n".join([*given, snippet.text]))
    (tmp_path / "ds_config.json").write_text('{"zero_optimization": {"stage": 2}}')
    outcome = run_script([program], cwd=tmp_path, timeout=120)
    assert (outcome.returncode, outcome.timed_out) == (0, False), outcome.stderr


# -- Commands --

READERS_FILES = {
    "mine.py": "from lightning_lockstep.demo import ConvNet, DigitsData\n\n\nclass Net(ConvNet):\n"
    "    def __init__(self, width: int = 8) -> None:\n        super().__init__(width=width)\n\n\n"
    "class Data(DigitsData):\n    pass\n",
    "my_conf/experiment/mine.yaml": "# @package _global_\ntrainer:\n  max_epochs: 1\n",
    "hosts": "node1 slots=4\nnode2 slots=4\n",
    "RUN/checkpoints/last.ckpt": "",
    "RUN/checkpoints/last.consolidated.ckpt": "",
    "ds_config.json": '{"zero_optimization": {"stage": 2}}',
}
#: Programs that no test starts as a page has them, and why.
NOT_HERE = {
    "scontrol": "needs Slurm",
    "python3": "makes an environment",
    ".": "makes an environment",
    "git": "asks another host",
    "docker": "needs an image",
}
#: Arguments that ask for a GPU, or run the doctor for a machine that the page imagines.
ELSEWHERE = {"trainer.accelerator=gpu", "debug=preflight"}
PROGRAMS = ("lockstep-train", "lockstep-doctor", "lockstep-consolidate")
MODULES = {"lightning_lockstep.train": "lockstep-train", "lightning_lockstep.doctor": "lockstep-doctor"}


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
    return tokens[0], tokens[1:]


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_can_be_given(command: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if command.not_run:
        pytest.skip(command.not_run)
    for name, text in READERS_FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    program, arguments = parts_of(command.text)
    if program in NOT_HERE:
        pytest.skip(NOT_HERE[program])
    check = globals().get(f"check_{re.sub(r'[-.]', '_', program.partition('/')[0])}")
    assert check, f"{command}: nothing here knows how to check {program!r}"
    check(command, program, arguments)


def check_lockstep_train(command: Snippet, program: str, arguments: list[str]) -> None:
    """What the command itself finds out before it starts anything; a sweep's first job stands for all."""
    if arguments == ["--install-completion"]:
        pytest.skip("changes ~/.bashrc; tests/sites/shells/test_completion.py runs it")
    words = [word for word in first_job(arguments) if word not in ELSEWHERE]
    if "--config-dir" in words or "data=own" in words:  # looked for from the folder where the program starts
        outcome = run_script(
            [sys.executable, "-m", "lightning_lockstep.train", *words, "--cfg", "job"], cwd=Path.cwd()
        )
        assert (outcome.returncode, outcome.stderr) == (0, "")
    else:
        assert faults_of(*words) == []


def first_job(arguments: list[str]) -> list[str]:
    """The arguments of the first job of a sweep, without who launches it."""
    plain = [word for word in arguments if word != "-m" and not word.startswith("hydra")]
    return [re.sub(r"=interval\(([^,]*),.*|=([^\[{,]*),.*", r"=\1\2", word) for word in plain]


def check_lockstep_doctor(command: Snippet, program: str, arguments: list[str]) -> None:
    """Checks of this machine alone run; of the others the command line is read, as `--explain` runs nothing."""
    here = {"kernel", "packages", "--explain", "--timeout", "20", "--only", "problem"}
    explain = [] if arguments and here.issuperset(arguments) else ["--explain", "kernel"]
    outcome = run_script(
        [sys.executable, "-m", "lightning_lockstep.doctor", *arguments, *explain], cwd=Path.cwd()
    )
    assert outcome.returncode in ((0,) if "--explain" in [*arguments, *explain] else (0, 1)), outcome.stderr
    assert outcome.stdout or "--only" in arguments


def check_lockstep_consolidate(command: Snippet, program: str, arguments: list[str]) -> None:
    """The arguments are read; then the folders that are not there are named."""
    from lightning_lockstep.deepspeed.checkpoints.command import main

    assert main(arguments) == 2


def check_python(command: Snippet, program: str, arguments: list[str]) -> None:
    first, *rest = arguments
    if first == "-m" and rest[0] == "benchmarks":
        if "--help" not in rest:
            pytest.skip("takes minutes; tests/programs/package/test_benchmarks.py runs them with few rounds")
        outcome = run_script([sys.executable, *arguments], cwd=ROOT)
        assert outcome.returncode == 0, outcome.stderr
    elif first == "-m":
        outcome = run_script([sys.executable, *arguments], cwd=Path.cwd())
        assert outcome.returncode == 0, outcome.stderr
    elif first.startswith("examples/"):  # tests/programs/application/test_examples.py and others run them
        source = (ROOT / first).read_text()
        assert [word for word in rest if word.startswith("--") and f'"{word}"' not in source] == []
    elif command.page == "docs/hydra.md" or command.page.startswith("examples/"):
        page = Path("examples/foreign_app/README.md" if command.page == "docs/hydra.md" else command.page)
        words = [word for word in first_job(rest) if not word.startswith("ckpt_path=")]
        refused = "exit code 2" in command.text
        look = [] if refused else ["--cfg", "job"]
        outcome = run_script(["train.py", *words, *look], cwd=ROOT / page.parent)
        assert outcome.returncode == (2 if refused else 0), outcome.stderr
    else:
        pytest.skip("a program of the reader")


def check_torchrun(command: Snippet, program: str, arguments: list[str]) -> None:
    check_python(command, "python", arguments[arguments.index("train.py") :])


def check_srun(command: Snippet, program: str, arguments: list[str]) -> None:
    pytest.skip("needs Slurm, and a program of the reader")


def check_pip(command: Snippet, program: str, arguments: list[str]) -> None:
    """The extras are there; nothing is installed."""
    named = re.findall(r"(?:lightning-lockstep|\.)\[([\w,-]+)\]", command.text)
    if not named:
        pytest.skip("installs packages")
    extras = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(",".join(named).split(",")) <= set(extras)


def check_scripts(command: Snippet, program: str, arguments: list[str]) -> None:
    assert (ROOT / program).stat().st_mode & 0o100


check_LOCKSTEP_TEST_TORCH = check_scripts


def check_export(command: Snippet, program: str, arguments: list[str]) -> None:
    outcome = run_script(["bash", "-ec", command.text], cwd=Path.cwd())
    assert (outcome.returncode, outcome.stderr) == (0, "")


# -- Tables of what to write --


def cells_to_write() -> list[tuple[Snippet, str]]:
    """What the right columns of docs/coming-from.md have in backquotes, and the part of the page it is in."""
    page, part, found = ROOT / "docs" / "coming-from.md", "", []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        part = line.removeprefix("## ") if line.startswith("## ") else part
        if line.startswith("| ") and not line.startswith(("| you have", "| ---")):
            cell = line.rsplit(" | ", 1)[1]
            found += [
                (Snippet("docs/coming-from.md", number, "", text), part)
                for text in re.findall("`(.+?)`", cell)
            ]
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


def without_dots(text: str) -> str:
    """An expression without the arguments that are `...`; a call that has no others is the name that it calls."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    left_out = [node for node in arguments if isinstance(node, ast.Constant) and node.value is ...]
    call.args = [argument for argument in call.args if argument not in left_out]
    call.keywords = [keyword for keyword in call.keywords if keyword.value not in left_out]
    return ast.unparse(call.func if left_out and not call.args and not call.keywords else call)


def test_what_other_packages_users_are_to_write_in_python_runs(tmp_path: Path) -> None:
    lines = [
        "from lightning_lockstep import *",
        "from lightning_lockstep.train import hydra_main",
        GIVEN["trainer"],
    ]
    lines += [GIVEN["model"], GIVEN["module"], GIVEN["Trainer"]]
    for cell, _ in CELLS:
        text, kind = cell.text.removeprefix("@"), kind_of(cell.text)
        if (
            "XLA" in text or "scale_batch_size" in text
        ):  # another environment; docs/batch-size.md has it with data
            continue
        if kind == "python":
            lines.append(f"{text if text.startswith(('import', 'from')) else without_dots(text)}  # {cell}")
        elif kind == "strategy":
            lines.append(f"Trainer(strategy={text}, accelerator='cpu')  # {cell}")
    assert len(lines) > 30
    (tmp_path / "ds_config.json").write_text(READERS_FILES["ds_config.json"])
    (tmp_path / "all.py").write_text("\n".join(lines))
    outcome = run_script([tmp_path / "all.py"], cwd=tmp_path, timeout=120)
    assert outcome.returncode == 0, outcome.stderr


@pytest.mark.parametrize(
    ("cell", "part"),
    [found for found in CELLS if kind_of(found[0].text) in ("command", "overrides")],
    ids=str,
)
def test_what_other_packages_users_are_to_write_in_a_shell_runs(
    cell: Snippet, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind_of(cell.text) == "command":
        test_a_command_can_be_given(cell, tmp_path, monkeypatch)
    elif part == "lightning-hydra-template" and not cell.text.startswith("ckpt_path"):
        app = ROOT / "examples" / "foreign_app"
        outcome = run_script(["train.py", *shlex.split(cell.text), "--cfg", "job"], cwd=app)
        assert outcome.returncode == 0, outcome.stderr
    else:
        monkeypatch.chdir(tmp_path)
        assert faults_of(*shlex.split(cell.text)) == []


# -- Configuration --


@pytest.mark.parametrize("block", DATA, ids=str)
def test_a_file_can_be_read_and_its_names_are_there(block: Snippet) -> None:
    if block.language == "toml":
        tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
        assert tomllib.loads(block.text)
        return
    assert list(yaml.safe_load_all(block.text)) != [None]
    for name in re.findall(r"(?:_target_|class_path): (lightning_lockstep\S+)", block.text):
        assert callable(locate(name))


# -- What is found --


def test_what_is_wrong_on_a_page_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "```\nx\n```\n\n<!-- not run: no TPU -->\n\n```bash\n# a\nlockstep-train strategy=dpp # b\nls \\\n  x\n```\n"
    )
    first, second = blocks_of(page)
    assert (first.language, second.language, second.line, second.not_run) == ("", "bash", 8, "no TPU")
    train, listing = commands_of(second)
    assert (train.line, listing.text) == (9, "ls x")
    assert parts_of(train.text) == ("lockstep-train", ["strategy=dpp"])
    assert parts_of("A=1 torchrun -n 2 -m lightning_lockstep.train seed=1 ...") == (
        "lockstep-train",
        ["seed=1"],
    )
    assert first_job(["-m", "hydra/launcher=x", "seed=1,2", "a.b=interval(0.1,1)", "c=[d,e]"]) == [
        "seed=1",
        "a.b=0.1",
        "c=[d,e]",
    ]
    assert missing_names("import os\nx = os.sep + x + y\ndef f(a): return a, x\nprint(f(z))") == [
        "x",
        "y",
        "z",
    ]
    with pytest.raises(AssertionError, match="dpp"):
        check_lockstep_train(train, "lockstep-train", ["strategy=dpp"])
