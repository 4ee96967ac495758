"""A folder that DeepSpeed has written becomes one Lightning checkpoint, with the weights that the model really had."""

from __future__ import annotations

import os
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lockstep.deepspeed.checkpoints.command import main
from lightning_lockstep.deepspeed.checkpoints.consolidation import consolidate, consolidated
from lightning_lockstep.deepspeed.checkpoints.files import is_deepspeed_checkpoint
from lightning_lockstep.deepspeed.checkpoints.resuming import whole_checkpoint
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.errors import ConfigurationError
from tests.harness import MODELS, run_ranks, run_script
from tests.models.deepspeed.program_checkpoints import (
    Net,
    check_consolidated,
    compare,
    truth,
    write_checkpoints,
)

# This process reads the checkpoints, and does not import DeepSpeed for it.
pytestmark = pytest.mark.filterwarnings("ignore:.*left out what is not plain data:RuntimeWarning")

PROGRAM = MODELS / "deepspeed" / "program_checkpoints.py"
DROPPED = ["callbacks.Custom", "hyper_parameters.activation", "best"]
#: Others, and those of three ranks, are in tests/variants.
NAMES = ["stage_0_bf16", "stage_2_bf16", "stage_2_fp32", "stage_3_bf16", "no_frozen"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two ranks."""
    folder = tmp_path_factory.mktemp("two")
    run_ranks(2, write_checkpoints, str(folder), NAMES, timeout=120, env={"DS_ACCELERATOR": "cpu"})
    return folder


@pytest.fixture
def copy(two: Path, tmp_path: Path) -> Path:
    """A checkpoint of stage 3, to be damaged."""
    return Path(shutil.copytree(two / "stage_3_bf16.ckpt", tmp_path / "copy.ckpt"))


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_optimizer_or_as_saved(name: str, two: Path, tmp_path: Path) -> None:
    folder = two / f"{name}.ckpt"
    check_consolidated(folder, tmp_path / "whole.ckpt")
    # Otherwise the comparison would not show which were taken.
    half = truth(folder, "as_saved")["hidden.weight"]
    of_optimizer = name in ("stage_2_bf16", "stage_3_bf16")
    assert torch.equal(half.float(), truth(folder)["hidden.weight"]) is not of_optimizer


def test_model_loads_it_where_deepspeed_cannot_be_imported(two: Path, tmp_path: Path) -> None:
    folder = tmp_path / "all"
    for name in ("stage_2_bf16", "no_frozen"):
        shutil.copytree(two / f"{name}.ckpt", folder / f"{name}.ckpt")
        shutil.copy(two / f"{name}.truth", folder)
    outcome = run_script([PROGRAM, folder])
    assert outcome.returncode == 0, outcome.output
    lines = [line for line in outcome.stdout.splitlines() if "wrong:" in line]
    assert lines == [f"{name} wrong: [] tied: True width: 5" for name in ("no_frozen", "stage_2_bf16")]


def test_entries_of_lightning_come_through(two: Path, tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="left out what is not plain data") as caught:
        output = consolidate(two / "stage_2_bf16.ckpt", tmp_path / "whole.ckpt")
    assert str(caught[0].message).endswith(f": {', '.join(DROPPED)}.")
    assert caught[0].filename == __file__
    checkpoint = torch.load(output, weights_only=True)
    del checkpoint["state_dict"]
    version = checkpoint.pop("pytorch-lightning_version")
    assert version.count(".") == 2
    assert checkpoint == {
        "epoch": 3,
        "global_step": 12,
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 4}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.25), "dirpath": "/runs"}},
        "lr_schedulers": [{"last_epoch": 3, "_last_lr": [0.1, 0.2]}],
        "hparams_name": "kwargs",
        "hyper_parameters": {
            "width": 5,
            "options": {"depth": 2, "nested": {"rate": 0.1}},
            "root": os.path.join("data", "words"),
            "table": {"a": [1]},
        },
        "Words": {"seen": 7},
    }


def read_whole(folder: str, *, divided: bool = True) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return whole_checkpoint(folder, Net(), current_communicator(), divided=divided)
        except ConfigurationError as error:
            return str(error)


def read_what_one_rank_cannot(folder: str) -> Any:
    missing = current_communicator().rank == 1
    return read_whole(f"{folder}/missing" if missing else folder, divided=False)


def reads(folder: str, whole: str) -> tuple[Any, Any]:
    return read_what_one_rank_cannot(folder), read_whole(whole)


def test_reading_is_a_matter_of_all_ranks(two: Path) -> None:
    folder = two / "stage_3_bf16.ckpt"
    one, two = run_ranks(2, reads, str(two / "stage_2_fp32.ckpt"), str(folder))
    # What one rank cannot read is an error of all.
    assert one[0] == two[0] and "rank 1: " in one[0] and "missing: does not exist" in one[0]
    # In evaluations of stage 3 rank 0 alone reads; the others have buffers, and get parameters when they are gathered.
    first, other = one[1], two[1]
    compare(first.pop("state_dict"), truth(folder))
    weights = other.pop("state_dict")
    assert {name for name, value in weights.items() if 0 not in value.stride()} == {"mean", "steps"}
    assert all(value.shape == truth(folder)[name].shape for name, value in weights.items())
    assert torch.equal(weights["mean"], truth(folder)["mean"])
    assert list(weights) == list(truth(folder)) and other == first


def edit(folder: Path, change: Callable[[dict[str, Any]], None], file: str) -> None:
    """Change what a file of a checkpoint holds."""
    path = folder / "checkpoint" / file
    states = torch.load(path, weights_only=False, mmap=True)
    change(states)
    torch.save(states, path.with_name("new"))
    path.with_name("new").replace(path)


def test_parameters_that_were_not_saved(copy: Path, two: Path) -> None:
    """As it happens to trained parameters that the optimizer does not have."""
    file = "zero_pp_rank_0_mp_rank_00_model_states.pt"
    edit(copy, lambda states: states["frozen_param_shapes"].pop("frozen.bias"), file)
    with pytest.raises(ConfigurationError, match=r"holds no values of frozen\.bias\. In stage 3 DeepSpeed saves only"):
        consolidated(copy)
    edit(copy, lambda states: states.update(frozen_param_shapes=None), file)
    with pytest.warns(RuntimeWarning, match=r"frozen\.bias \(the run did not save its values\)"):
        weights = consolidated(copy)["state_dict"]
    expected = truth(two / "stage_3_bf16.ckpt")
    compare(weights, {name: value for name, value in expected.items() if not name.startswith("frozen")})


@pytest.fixture
def small_files() -> Iterator[None]:
    """A full disk, as near as a test can come: no file can be longer than 2000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_a_write_that_fails_leaves_what_was_there(two: Path, tmp_path: Path) -> None:
    output = tmp_path / "whole.ckpt"
    output.write_text("older")
    with pytest.raises(
        ConfigurationError,
        match=r"output='.*whole.ckpt': expected a file that can be written \(File too large\)",
    ):
        consolidate(two / "stage_2_fp32.ckpt", output)
    assert output.read_text() == "older"
    assert list(tmp_path.iterdir()) == [output]


# -- files that are missing, damaged or foreign --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("stage_2_bf16", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("stage_3_bf16", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
    ],
)
def test_missing_file_is_named(two: Path, tmp_path: Path, name: str, lacking: str) -> None:
    folder = Path(shutil.copytree(two / f"{name}.ckpt", tmp_path / "copy.ckpt"))
    (folder / "checkpoint" / lacking).unlink()
    message = (
        rf"1 of 2 ranks' files are there; missing: {lacking}\. Each node writes those of its ranks: name the"
        r" folders of all nodes"
    )
    with pytest.raises(ConfigurationError, match=message):
        consolidated(folder)
    for file in (folder / "checkpoint").glob("*optim*"):
        file.unlink()
    with pytest.raises(ConfigurationError, match=r"0 of 2 ranks' files are there; missing: .*zero_pp_"):
        consolidated(folder)


def of_two_nodes(whole: Path, folder: Path) -> tuple[Path, Path]:
    first, second = folder / "node0" / "last.ckpt", folder / "node1" / "last.ckpt"
    shutil.copytree(whole, first, ignore=shutil.ignore_patterns("*rank_1_mp*"))
    shutil.copytree(whole, second, ignore=shutil.ignore_patterns("*rank_0_mp*", "latest"))
    return first, second


def test_folders_of_two_nodes_are_brought_together(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = two / "stage_3_bf16.ckpt"
    first, second = of_two_nodes(whole, tmp_path)
    for node in (first, second):
        assert main([str(node)]) == 2
        assert "1 of 2 ranks' files are there; missing: " in capsys.readouterr().err
    output = tmp_path / "whole.ckpt"
    assert main([str(second), str(first), "--output", str(output)]) == 0
    compare(torch.load(output, weights_only=True)["state_dict"], truth(whole))
    assert main([str(first), str(second)]) == 0
    assert first.with_name("last.consolidated.ckpt").is_file()
    shutil.copytree(second, first, dirs_exist_ok=True)
    compare(consolidated(first)["state_dict"], truth(whole))
    compare(consolidated([first, second])["state_dict"], truth(whole))  # files that are the same twice


def test_folders_of_two_nodes_from_different_steps(two: Path, tmp_path: Path) -> None:
    first, second = of_two_nodes(two / "stage_2_fp32.ckpt", tmp_path)
    file = "zero_pp_rank_1_mp_rank_00_optim_states.pt"

    def step_on(states: dict[str, Any]) -> None:
        for entry in states["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            entry["step"] = entry["step"] + 1

    edit(second, step_on, file)
    with pytest.raises(
        ConfigurationError,
        match=rf"files of one save, but the optimizer's number of steps is 3.0 in .* and 4.0 in {file}",
    ):
        consolidated([first, second])
    edit(second, lambda states: states.update(global_steps=4), "mp_rank_00_model_states.pt")
    with pytest.raises(ConfigurationError, match="differ: expected the folders of one checkpoint"):
        consolidated([first, second])


def test_a_file_that_is_cut_off(copy: Path) -> None:
    file = copy / "checkpoint" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(
        ConfigurationError, match=rf"{file.name}: cannot be read \(.+\)\. Expected a whole file of DeepSpeed"
    ):
        consolidated(copy)


def test_experts_are_refused(copy: Path) -> None:
    (copy / "checkpoint" / "layer_3_expert_1_mp_rank_00_model_states.pt").touch()
    with pytest.raises(ConfigurationError, match=r"is of .*experts.*, which is not supported. Expected one of plain"):
        consolidated(copy)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none.ckpt: does not exist. Expected the folder of a DeepSpeed"):
        consolidated(tmp_path / "none.ckpt")
    with pytest.raises(ConfigurationError, match=r"is not a DeepSpeed checkpoint. Expected a folder such as epoch=1"):
        consolidated(tmp_path)
    (tmp_path / "file.ckpt").touch()
    with pytest.raises(ConfigurationError, match=r"file.ckpt: is a file, which needs no consolidation"):
        consolidated(tmp_path / "file.ckpt")
    assert not any(map(is_deepspeed_checkpoint, (tmp_path, tmp_path / "none.ckpt", tmp_path / "file.ckpt")))


def test_a_folder_is_no_output(two: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"expected a file that can be written \(Is a directory\)"):
        consolidate(two / "stage_2_fp32.ckpt", tmp_path)


# -- nothing of a file is run --------------------------------------------------------------------------------------


class Bomb:
    """Runs a function when it is unpickled in the usual way."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def plant(folder: Path, **entries: Any) -> None:
    """Put entries into the model states of a checkpoint."""
    edit(folder, lambda states: states.update(entries), "mp_rank_00_model_states.pt")


def test_code_in_a_file_is_not_run(two: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(two / "stage_0_bf16.ckpt", tmp_path / "copy.ckpt"))
    proof = tmp_path / "proof"
    bomb = Bomb(exec, f"import pathlib; pathlib.Path({str(proof)!r}).touch()")
    plant(
        folder,
        epoch=4,
        callbacks={"Bomb": bomb},
        hyper_parameters={"width": 5, "deep": [{"b": bomb}]},
        own=bomb,
    )
    proof.unlink(missing_ok=True)
    torch.load(folder / "checkpoint" / "mp_rank_00_model_states.pt", weights_only=False)
    assert proof.exists(), "the bomb is none"
    proof.unlink()
    safe = set(torch.serialization.get_safe_globals())
    with pytest.warns(RuntimeWarning, match=r"plain data: .*callbacks.Bomb.*hyper_parameters.deep.*, own\.$"):
        output = consolidate(folder, tmp_path / "whole.ckpt")
    checkpoint = torch.load(output, weights_only=True)
    assert not proof.exists()
    assert set(torch.serialization.get_safe_globals()) == safe
    assert checkpoint["epoch"] == 4
    assert checkpoint["callbacks"] == {}
    assert checkpoint["hyper_parameters"] == {"width": 5}
    assert "own" not in checkpoint


def test_functions_that_run_programs_are_refused(two: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(two / "stage_0_bf16.ckpt", tmp_path / "copy.ckpt"))
    proof = tmp_path / "proof"
    plant(folder, own=Bomb(os.system, f"touch {proof}"))
    with pytest.raises(ConfigurationError, match=r"names posix.system, which could run code .* none of it was run"):
        consolidated(folder)
    assert not proof.exists()


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["last.ckpt", "last.ckpt.before"])
def test_command_writes_beside_the_folder(
    name: str, two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    folder = run / "checkpoints" / name
    shutil.copytree(two / "stage_3_bf16.ckpt", folder)
    assert is_deepspeed_checkpoint(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main([str(run)]) == 0
    output = run / "checkpoints" / "last.consolidated.ckpt"
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{output}: ") and printed.out.endswith(" KiB\n")
    aside = "last.ckpt.before, because the save that should have replaced it was killed"
    assert (aside in printed.err) == (name != "last.ckpt")
    assert (
        f"lockstep-consolidate: {folder / 'checkpoint'}: left out what is not plain data: {', '.join(DROPPED)}"
        in printed.err
    )
    compare(torch.load(output, weights_only=True)["state_dict"], truth(two / "stage_3_bf16.ckpt"))


def test_command_replaces_a_file_only_if_told(two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "whole.ckpt"
    output.write_text("older")
    arguments = [str(two / "stage_3_bf16.ckpt"), "--output", str(output), "--dtype", "as_saved"]
    assert main(arguments) == 2
    assert capsys.readouterr().err == (
        f"lockstep-consolidate: {output}: exists. Add --force to replace it, or name another file.\n"
    )
    assert output.read_text() == "older"
    assert main([*arguments, "--force"]) == 0
    compare(torch.load(output, weights_only=True)["state_dict"], truth(two / "stage_3_bf16.ckpt", "as_saved"))
