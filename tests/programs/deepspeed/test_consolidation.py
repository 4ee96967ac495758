"""A folder that DeepSpeed has written becomes one Lightning checkpoint, with the weights that the model really had."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lockstep.deepspeed.checkpoints import consolidation
from lightning_lockstep.deepspeed.checkpoints.command import main
from lightning_lockstep.deepspeed.checkpoints.consolidation import consolidate, consolidated
from lightning_lockstep.deepspeed.checkpoints.files import is_deepspeed_checkpoint, read_file
from lightning_lockstep.deepspeed.checkpoints.resuming import whole_checkpoint
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.plain_data import plain_entries
from lightning_lockstep.errors import ConfigurationError
from tests.common.deepspeed.program_checkpoints import CONFIGS, Net, write_checkpoints
from tests.helpers import COMMON, run_ranks, run_script

# Looked for and not imported: this process reads the checkpoints, and must not need DeepSpeed for it.
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
    pytest.mark.filterwarnings("ignore:.*left out what is not plain data:RuntimeWarning"),
]

PROGRAM = COMMON / "deepspeed" / "program_checkpoints.py"
DROPPED = ["callbacks.Custom", "hyper_parameters.activation", "best"]


def names(ranks: int) -> list[str]:
    """The checkpoints that a number of ranks writes: all that this machine can, and of three the odd ones."""
    try:
        fp16 = torch.ops.mkldnn._is_mkldnn_fp16_supported()
    except (AttributeError, RuntimeError):
        fp16 = False
    left_out = () if fp16 and ranks == 2 else ("fp16",)
    left_out += () if ranks == 2 else ("no_frozen", "no_frozen_2", "zero_init")
    return [name for name in CONFIGS if not name.endswith(left_out)]


CASES = [pytest.param(ranks, name, id=f"{name}_of_{ranks}") for ranks in (2, 3) for name in names(ranks)]


def write(folder: Path, ranks: int) -> Path:
    run_ranks(ranks, write_checkpoints, str(folder), names(ranks), timeout=120, env={"DS_ACCELERATOR": "cpu"})
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All checkpoints of two ranks."""
    return write(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All checkpoints of three ranks."""
    return write(tmp_path_factory.mktemp("three"), 3)


@pytest.fixture
def written(ranks: int, two: Path, three: Path) -> Path:
    return {2: two, 3: three}[ranks]


@pytest.fixture
def copy(two: Path, tmp_path: Path) -> Path:
    """A checkpoint of two ranks and stage 3, to be damaged."""
    return Path(shutil.copytree(two / "stage_3_bf16.ckpt", tmp_path / "copy.ckpt"))


def truth(folder: Path, dtype: str = "float32") -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = torch.load(folder.with_suffix(".truth"))[dtype]
    return weights


def compare(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    wrong = {
        name: (found[name], value)
        for name, value in expected.items()
        if found[name].dtype != value.dtype or not torch.equal(found[name], value)
    }
    assert not wrong


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_weights_are_those_of_the_optimizer(written: Path, name: str) -> None:
    folder = written / f"{name}.ckpt"
    expected = truth(folder)
    found = consolidated(folder)["state_dict"]
    compare(found, expected)
    for name, other in (("head", "embedding"), ("again", "hidden")):
        assert found[f"{name}.weight"].data_ptr() == found[f"{other}.weight"].data_ptr()
    assert found["hidden.weight"].untyped_storage().nbytes() == 7 * 5 * 4
    assert "cache" not in found
    assert not any(value.requires_grad for value in found.values())
    assert found._metadata[""] == {"version": 3}


def test_float32_copies_differ_from_the_weights_in_half_precision(two: Path, three: Path) -> None:
    """Otherwise the comparison above would not show which were taken."""
    for folder in (*two.glob("*.ckpt"), *three.glob("*.ckpt")):
        half = truth(folder, "as_saved")["hidden.weight"]
        if half.dtype != torch.float32:
            assert not torch.equal(half.float(), truth(folder)["hidden.weight"]), folder


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_as_saved_are_the_weights_of_the_model(written: Path, name: str, tmp_path: Path) -> None:
    folder = written / f"{name}.ckpt"
    output = consolidate(folder, tmp_path / "whole.ckpt", dtype="as_saved")
    compare(torch.load(output, weights_only=True)["state_dict"], truth(folder, "as_saved"))


@pytest.mark.parametrize("ranks", [2, 3])
def test_model_loads_it_where_deepspeed_cannot_be_imported(ranks: int, written: Path, tmp_path: Path) -> None:
    folder = tmp_path / "all"
    shutil.copytree(written, folder)
    outcome = run_script([PROGRAM, folder], timeout=300)
    assert outcome.returncode == 0, outcome.output
    lines = [line for line in outcome.stdout.splitlines() if "wrong:" in line]
    assert sorted(lines) == sorted(f"{name} wrong: [] tied: True width: 5" for name in names(ranks))


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
        "callbacks": {
            "ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.25), "dirpath": "/runs"}
        },
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


def test_result_refers_to_no_file(two: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(two / "stage_1_fp32.ckpt", tmp_path / "gone.ckpt"))
    checkpoint = consolidated(folder)
    for path in folder.rglob("*.pt"):
        path.write_bytes(bytes(path.stat().st_size))
    compare(checkpoint["state_dict"], truth(two / "stage_1_fp32.ckpt"))
    score = checkpoint["callbacks"]["ModelCheckpoint{'monitor': None}"]["best_model_score"]
    assert score == 0.25


def test_weights_that_do_not_fit_into_memory_go_through_files(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consolidation, "memory_budget", lambda: 100)
    output = consolidate(two / "stage_3_bf16.ckpt", tmp_path / "whole.ckpt")
    assert list(tmp_path.iterdir()) == [output]
    found = torch.load(output, weights_only=True)["state_dict"]
    compare(found, truth(two / "stage_3_bf16.ckpt"))
    assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()


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


def test_what_one_rank_cannot_read_is_an_error_of_all(two: Path) -> None:
    first, other = run_ranks(2, read_what_one_rank_cannot, str(two / "stage_2_fp32.ckpt"))
    assert first == other and "rank 1 on " in first and "missing: does not exist" in first


def test_ranks_without_the_weights_get_the_buffers(two: Path) -> None:
    """In evaluations of stage 3, where rank 0 alone reads, and parameters go to the others when they are gathered."""
    folder = two / "stage_3_bf16.ckpt"
    first, other = run_ranks(2, read_whole, str(folder))
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


def test_parameters_without_a_dimension(two: Path, tmp_path: Path) -> None:
    """DeepSpeed 0.19.8 cannot train with them; other releases can."""
    folder = Path(shutil.copytree(two / "stage_2_bf16.ckpt", tmp_path / "copy.ckpt"))

    def make_scalar(states: dict[str, Any]) -> None:
        states["module"]["scale"] = states["module"]["scale"].squeeze()
        states["param_shapes"][1]["scale"] = torch.Size([])

    edit(folder, make_scalar, "mp_rank_00_model_states.pt")
    expected = truth(two / "stage_2_bf16.ckpt")
    expected["scale"] = expected["scale"].squeeze()
    compare(consolidated(folder)["state_dict"], expected)


def test_flat_copies_of_stage_0(two: Path, tmp_path: Path) -> None:
    """As DeepSpeed's own Adam for GPUs has them: the copies of a group follow each other in one vector."""
    folder = Path(shutil.copytree(two / "stage_0_bf16.ckpt", tmp_path / "copy.ckpt"))

    def make_flat(states: dict[str, Any]) -> None:
        groups = states["optimizer"].pop("fp32_groups")
        flat = [torch.cat([tensor.flatten() for tensor in group]) for group in groups]
        states["optimizer"]["fp32_groups_flat"] = flat
        # By chance it is where the copy of hidden.bias begins, and it comes before that one.
        states["module"]["frozen_scale"][0] = states["module"]["hidden.bias"][0]

    edit(folder, make_flat, "mp_rank_00_model_states.pt")
    expected = truth(two / "stage_0_bf16.ckpt")
    expected["frozen_scale"][0] = truth(two / "stage_0_bf16.ckpt", "as_saved")["hidden.bias"][0]
    compare(consolidated(folder)["state_dict"], expected)


def test_copies_of_stage_0_that_are_of_other_weights(two: Path, tmp_path: Path) -> None:
    """Then the weights themselves are taken."""
    folder = Path(shutil.copytree(two / "stage_0_bf16.ckpt", tmp_path / "copy.ckpt"))

    def spoil(states: dict[str, Any]) -> None:
        for group in states["optimizer"]["fp32_groups"]:
            group[-1].data += 1

    edit(folder, spoil, "mp_rank_00_model_states.pt")
    saved = truth(two / "stage_0_bf16.ckpt", "as_saved")
    expected = {name: v.float() if v.is_floating_point() else v for name, v in saved.items()}
    compare(consolidated(folder)["state_dict"], expected)


def test_other_state_of_modules(two: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(two / "stage_2_bf16.ckpt", tmp_path / "copy.ckpt"))
    extra = {"norm._extra_state": {"calls": 3}, "out._extra_state": torch.nn.ReLU()}
    edit(folder, lambda states: states["module"].update(extra), "mp_rank_00_model_states.pt")
    with pytest.warns(RuntimeWarning, match=r"left out what is not plain data: .*, out\._extra_state\.$"):
        weights = consolidated(folder)["state_dict"]
    assert weights.pop("norm._extra_state") == {"calls": 3}
    compare(weights, truth(two / "stage_2_bf16.ckpt"))


def test_parameters_that_were_not_saved(copy: Path, two: Path) -> None:
    """As it happens to trained parameters that the optimizer does not have."""
    file = "zero_pp_rank_0_mp_rank_00_model_states.pt"
    edit(copy, lambda states: states["frozen_param_shapes"].pop("frozen.bias"), file)
    with pytest.raises(
        ConfigurationError, match=r"holds no values of frozen\.bias\. In stage 3 DeepSpeed saves only"
    ):
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
        ConfigurationError, match=r"output='.*whole.ckpt': cannot be written \(File too large\)"
    ):
        consolidate(two / "stage_2_fp32.ckpt", output)
    assert output.read_text() == "older"
    assert list(tmp_path.iterdir()) == [output]


def test_output_has_the_usual_permissions(two: Path, tmp_path: Path) -> None:
    output = consolidate(two / "stage_2_fp32.ckpt", tmp_path / "new" / "whole.ckpt")
    (tmp_path / "usual").touch()
    assert output.stat().st_mode == (tmp_path / "usual").stat().st_mode


# -- files that are missing, damaged or foreign --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("stage_1_fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("stage_2_bf16", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("stage_3_bf16", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("stage_3_fp32", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("stage_3_bf16", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
    ],
)
def test_missing_file_is_named(three: Path, tmp_path: Path, name: str, lacking: str) -> None:
    folder = Path(shutil.copytree(three / f"{name}.ckpt", tmp_path / "copy.ckpt"))
    (folder / "checkpoint" / lacking).unlink()
    message = (
        rf"2 of 3 ranks' files are there; missing: {lacking}\. Each node writes those of its ranks: name the"
        r" folders of all nodes"
    )
    with pytest.raises(ConfigurationError, match=message):
        consolidated(folder)


def test_folders_of_two_nodes_are_brought_together(three: Path, tmp_path: Path) -> None:
    whole = three / "stage_3_bf16.ckpt"
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    shutil.copytree(whole, first, ignore=shutil.ignore_patterns("*rank_2_mp*"))
    shutil.copytree(whole, second, ignore=shutil.ignore_patterns("*rank_[01]_mp*", "latest"))
    for node, there in ((first, 2), (second, 1)):
        with pytest.raises(ConfigurationError, match=f"{there} of 3 ranks' files are there; missing: "):
            consolidated(node)
    compare(consolidated([second, first])["state_dict"], truth(whole))
    shutil.copytree(second, first, dirs_exist_ok=True)
    compare(consolidated(first)["state_dict"], truth(whole))
    compare(consolidated([first, second])["state_dict"], truth(whole))  # files that are the same twice


def test_folders_of_two_nodes_from_different_steps(three: Path, tmp_path: Path) -> None:
    whole = three / "stage_2_fp32.ckpt"
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    shutil.copytree(whole, first, ignore=shutil.ignore_patterns("*rank_2_mp*"))
    shutil.copytree(whole, second, ignore=shutil.ignore_patterns("*rank_[01]_mp*"))
    file = "zero_pp_rank_2_mp_rank_00_optim_states.pt"

    def step_on(states: dict[str, Any]) -> None:
        for entry in states["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            entry["step"] = entry["step"] + 1

    edit(second, step_on, file)
    with pytest.raises(
        ConfigurationError,
        match=rf"different times: the optimizer has made \[3.0\] steps in .*\[4.0\] in {file}",
    ):
        consolidated([first, second])
    edit(second, lambda states: states.update(global_steps=4), "mp_rank_00_model_states.pt")
    with pytest.raises(ConfigurationError, match="differ: expected the folders of one checkpoint"):
        consolidated([first, second])


def test_command_takes_the_folders_of_all_nodes(
    three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = three / "stage_3_bf16.ckpt"
    first, second = tmp_path / "node0" / "last.ckpt", tmp_path / "node1" / "last.ckpt"
    shutil.copytree(whole, first, ignore=shutil.ignore_patterns("*rank_2_mp*"))
    shutil.copytree(whole, second, ignore=shutil.ignore_patterns("*rank_[01]_mp*"))
    assert main([str(first)]) == 2
    assert "2 of 3 ranks' files are there" in capsys.readouterr().err
    output = tmp_path / "whole.ckpt"
    assert main([str(first), str(second), str(output)]) == 0
    compare(torch.load(output, weights_only=True)["state_dict"], truth(whole))
    assert main([str(first), str(second)]) == 0
    assert (tmp_path / "node0" / "last.consolidated.ckpt").is_file()
    assert main([str(first), str(second), "--output", str(tmp_path / "other.ckpt")]) == 0


def test_no_optimizer_states_at_all_are_missing_too(two: Path, tmp_path: Path) -> None:
    folder = Path(
        shutil.copytree(
            two / "stage_2_bf16.ckpt", tmp_path / "copy.ckpt", ignore=shutil.ignore_patterns("*optim*")
        )
    )
    missing = ", ".join(f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))
    with pytest.raises(ConfigurationError, match=f"0 of 2 ranks' files are there; missing: {missing}"):
        consolidated(folder)


@pytest.mark.parametrize("kept", [0, 100, 3000])
def test_a_file_that_is_cut_off(copy: Path, kept: int) -> None:
    file = copy / "checkpoint" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(
        ConfigurationError, match=rf"{file.name}: cannot be read \(.+\)\. Expected a file of DeepSpeed"
    ):
        consolidated(copy)


def test_files_of_two_runs_do_not_go_together(copy: Path, two: Path, three: Path) -> None:
    rank_1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(three / "stage_3_bf16.ckpt" / "checkpoint" / rank_1, copy / "checkpoint" / rank_1)
    with pytest.raises(
        ConfigurationError, match=r"hold \d+ values of rank 1, expected \d+\. Either the files are of"
    ):
        consolidated(copy)
    model = "zero_pp_rank_1_mp_rank_00_model_states.pt"
    shutil.copy(three / "stage_3_bf16.ckpt" / "checkpoint" / model, copy / "checkpoint" / model)
    with pytest.raises(ConfigurationError, match=r"different times: dp_world_size is 2 in .* and 3 in"):
        consolidated(copy)
    shutil.copytree(two / "stage_2_bf16.ckpt", copy, dirs_exist_ok=True)
    with pytest.raises(
        ConfigurationError, match="files of several runs, some of which begin with 'mp_rank_' and"
    ):
        consolidated(copy)


def test_fewer_values_than_the_parameters_have(two: Path, three: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(two / "stage_2_fp32.ckpt", tmp_path / "copy.ckpt"))
    rank_0 = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(three / "stage_2_fp32.ckpt" / "checkpoint" / rank_0, folder / "checkpoint" / rank_0)
    with pytest.raises(
        ConfigurationError, match=r"hold \d+ values of parameter group 0, expected \d+\. Either"
    ):
        consolidated(folder)


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("mp_rank_01_model_states.pt", "tensor or pipeline parallelism"),
        ("layer_3_expert_1_mp_rank_00_model_states.pt", "experts"),
        ("layer_01-model_00-model_states.pt", "pipeline parallelism"),
        ("zero/fp32.pt", "universal checkpoint"),
    ],
)
def test_other_kinds_of_checkpoints_are_refused(copy: Path, file: str, kind: str) -> None:
    path = copy / "checkpoint" / file
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with pytest.raises(
        ConfigurationError, match=f"is of .*{kind}.*, which is not supported. Expected one of plain"
    ):
        consolidated(copy)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"none.ckpt: does not exist. Expected the folder of a DeepSpeed"
    ):
        consolidated(tmp_path / "none.ckpt")
    with pytest.raises(
        ConfigurationError, match=r"is not a DeepSpeed checkpoint. Expected a folder such as epoch=1"
    ):
        consolidated(tmp_path)
    (tmp_path / "file.ckpt").touch()
    with pytest.raises(ConfigurationError, match=r"file.ckpt: is a file, which needs no consolidation"):
        consolidated(tmp_path / "file.ckpt")
    assert not any(map(is_deepspeed_checkpoint, (tmp_path, tmp_path / "none.ckpt", tmp_path / "file.ckpt")))


def test_dtype_and_output_are_checked_together(two: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        consolidate(two / "stage_2_fp32.ckpt", tmp_path, dtype="float16")  # type: ignore[arg-type]
    assert caught.value.faults == (
        "dtype='float16': expected one of 'float32', 'as_saved'. Did you mean 'float32'?",
        f"output={str(tmp_path)!r}: expected a file to write, not a folder.",
    )


def test_tags(two: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    for name in ("stage_2_fp32", "stage_3_fp32"):
        shutil.copytree(two / f"{name}.ckpt" / "checkpoint", folder / name)
    assert is_deepspeed_checkpoint(folder)
    with pytest.raises(
        ConfigurationError, match=r"holds several checkpoints. Say which, by tag='stage_3_fp32'"
    ):
        consolidated(folder)
    with pytest.raises(
        ConfigurationError, match=r"which has stage_2_fp32, stage_3_fp32. Did you mean 'stage_2_fp32'"
    ):
        consolidated(folder, tag="stage_2_fp3")
    with pytest.raises(ConfigurationError, match="expected a checkpoint in"):
        consolidated(folder / "stage_2_fp32", tag="../stage_2_fp32")
    expected = truth(two / "stage_3_fp32.ckpt")
    compare(consolidated(folder, tag="stage_3_fp32")["state_dict"], expected)
    (folder / "latest").write_text("stage_3_fp32\n")
    compare(consolidated(folder)["state_dict"], expected)
    compare(consolidated(folder / "stage_3_fp32")["state_dict"], expected)


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
    folder = Path(shutil.copytree(two / "stage_0_fp32.ckpt", tmp_path / "copy.ckpt"))
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
    folder = Path(shutil.copytree(two / "stage_0_fp32.ckpt", tmp_path / "copy.ckpt"))
    proof = tmp_path / "proof"
    plant(folder, own=Bomb(os.system, f"touch {proof}"))
    with pytest.raises(
        ConfigurationError, match=r"names posix.system, which could run code .* none of it was run"
    ):
        consolidated(folder)
    assert not proof.exists()


class Stack(list):  # type: ignore[type-arg]
    """A list of its own class."""


def test_inert_objects_and_their_containers(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    torch.save({"stack": Stack([1, 2]), "device": torch.device("cpu"), "bomb": Bomb(print, "ran", 1)}, file)
    content = read_file(file)
    assert content["stack"] == [1, 2]
    assert type(content["stack"]) is list
    assert content["bomb"].arguments == ("ran", 1)
    assert repr(content["bomb"]) == "<inert builtins.print>"
    kept, dropped = plain_entries(content)
    assert kept == {"stack": [1, 2], "device": torch.device("cpu")}
    assert dropped == ["bomb"]
    torch.save([1], file)
    with pytest.raises(ConfigurationError, match=r"file.pt: expected a dictionary, found list"):
        read_file(file)


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
    # 55 tied, 30 frozen, 1 frozen, 42 hidden, 14 norm, 40 out, 1 scale, 7 odd, 7 mean, 1 steps
    assert printed.out.startswith(f"{output}: 18 tensors with 198 values of float32, int64, ")
    assert printed.out.endswith(" KiB\n")
    aside = "last.ckpt.before, as a save that was to replace it was killed"
    assert (aside in printed.err) == (name != "last.ckpt")
    assert (
        f"lockstep-consolidate: {folder / 'checkpoint'}: left out what is not plain data: {', '.join(DROPPED)}"
        in printed.err
    )
    compare(torch.load(output, weights_only=True)["state_dict"], truth(two / "stage_3_bf16.ckpt"))


def test_command_replaces_a_file_only_if_told(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "whole.ckpt"
    output.write_text("older")
    arguments = [str(two / "stage_3_bf16.ckpt"), str(output), "--dtype", "as_saved", "--tag", "checkpoint"]
    assert main(arguments) == 2
    assert capsys.readouterr().err == (
        f"lockstep-consolidate: {output}: exists. Add --force to replace it, or name another file.\n"
    )
    assert output.read_text() == "older"
    assert main([*arguments, "--force"]) == 0
    assert "values of bfloat16, float32, int64" in capsys.readouterr().out
    compare(torch.load(output, weights_only=True)["state_dict"], truth(two / "stage_3_bf16.ckpt", "as_saved"))


def test_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: lockstep-consolidate [-h] [--tag TAG] [--dtype {float32,as_saved}]")


def test_command_says_in_one_line_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"lockstep-consolidate: {tmp_path}: is not a DeepSpeed checkpoint.")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
