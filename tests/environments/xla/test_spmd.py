"""LockstepXLASPMDStrategy on four virtual devices: the same numbers as on one CPU device, and plain checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import XLAAccelerator
from torch.utils.data import DataLoader

from lightning_lockstep.errors import ConfigurationError
from tests.environments.xla.digits import BATCH, CLOSE, Classifier, fitted, loaders, numbers, spmd, trainer


def sharding(tensor: torch.Tensor) -> str:
    import torch_xla

    return str(torch_xla._XLAC._get_xla_sharding_spec(tensor))


@pytest.mark.parametrize("options", [{}, {"parameters": "fsdp", "min_size": 1000}])
def test_losses_and_logged_metrics_are_those_of_one_device(tmp_path: Path, options: dict[str, Any]) -> None:
    expected, alone = fitted(tmp_path)
    found, divided = fitted(tmp_path, spmd(**options))
    assert len(alone.losses) == 10, "five batches, of which the last one is smaller, twice"
    assert divided.losses == pytest.approx(alone.losses, abs=CLOSE)
    assert numbers(found.callback_metrics) == pytest.approx(numbers(expected.callback_metrics), abs=CLOSE)


class Looks(Classifier):
    """Notes how its parameters and their states are divided at the end of each epoch."""

    def on_train_epoch_end(self) -> None:
        state = self.trainer.optimizers[0].state
        self.found = {
            name: (sharding(parameter), sharding(state[parameter]["exp_avg"]))
            for name, parameter in self.named_parameters()
        }


def test_batches_and_large_parameters_are_divided(tmp_path: Path) -> None:
    class Module(Looks):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            self.of_batch = [sharding(one) for one in batch]
            return super().training_step(batch, batch_idx)

    module = Module()
    fitted(tmp_path, spmd(parameters="fsdp", min_size=2000, patterns=["*.2.bias"]), module=module)
    assert module.of_batch == ["{devices=[4,1]0,1,2,3}", "{devices=[4]0,1,2,3}"]
    rows, short, whole = "{devices=[4,1]0,1,2,3}", "{devices=[4]0,1,2,3}", "{replicated}"
    assert module.found["net.0.weight"] == (rows, rows), "128 x 64 has 8192 values"
    assert module.found["net.2.bias"] == (short, short), "named by a pattern"
    assert module.found["net.2.weight"][0] == whole, "12 x 128 has 1536 values"
    assert module.found["net.0.bias"][0] == whole


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_checkpoint_is_plain_and_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    _, whole = fitted(tmp_path, spmd(parameters="fsdp", min_size=1000), max_epochs=3)
    first, begun = fitted(tmp_path, spmd(), max_epochs=2, enable_checkpointing=True)
    path = first.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    module = Looks()
    divided = spmd(parameters="fsdp", min_size=1000)
    made = trainer(tmp_path / "resumed", divided, max_epochs=3, enable_checkpointing=True)
    made.fit(module, *loaders(), ckpt_path=path)
    losses = begun.losses + [float(loss) for loss in module.losses]
    assert losses == pytest.approx(whole.losses, abs=CLOSE)
    assert module.found["net.0.weight"] == ("{devices=[4,1]0,1,2,3}",) * 2
    # In a process that cannot import torch_xla.
    program = (
        "import sys, torch; sys.modules['torch_xla'] = None\n"
        f"state = torch.load({path!r}, weights_only=False)\n"
        "values = list(state['state_dict'].values()) + [v for s in state['optimizer_states'][0]['state'].values()"
        " for v in s.values()]\n"
        "print(sorted({v.device.type for v in values}), state['global_step'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "['cpu'] 10", done.stderr


class Counts(Classifier):
    """Its loss is a mean over the digits that are no zeros, of which batches have different numbers."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:  # type: ignore[override]
        rows, labels = batch
        counted = (labels > 0).float()
        losses = torch.nn.functional.cross_entropy(self.net(rows) * self.scale, labels, reduction="none")
        return {"loss": (losses * counted).sum() / counted.sum(), "num_items": counted.sum()}


@pytest.mark.parametrize("kind", [Classifier, Counts])
def test_a_step_is_the_mean_over_its_samples_or_items(tmp_path: Path, kind: type[Classifier]) -> None:
    """Five micro-batches are three steps, the last one of a micro-batch of 44; on one device three batches."""

    def fit(strategy: Any, **options: Any) -> tuple[int, float]:
        torch.manual_seed(1)
        made, _ = fitted(tmp_path, strategy, module=kind(), gradient_clip_val=0.5, **options)
        return made.global_step, float(made.callback_metrics["val_loss"])

    steps, loss = fit(spmd(), accumulate_grad_batches=2)
    assert (steps, pytest.approx(loss, abs=CLOSE)) == fit("auto", batch=2 * BATCH)
    assert steps == 6


def test_a_shuffled_epoch_has_the_order_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")

    class Sees(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.extend(batch[1].tolist())

    seen: list[int] = []
    labels = torch.arange(13)
    loader = DataLoader(torch.utils.data.TensorDataset(torch.zeros(13, 64), labels % 12), 4, shuffle=True)
    trainer(tmp_path, spmd(), max_epochs=1).fit(Sees(), loader, loaders()[1])
    torch.manual_seed(3)  # of the run and epoch 0, from which one process of torch draws the same
    assert seen == [number % 12 for number in loader.sampler]


def test_test_and_predict_are_those_of_one_device(tmp_path: Path) -> None:
    _, module = fitted(tmp_path)
    _, held_out = loaders()
    expected = trainer(tmp_path).test(module, held_out, verbose=False)
    found = trainer(tmp_path, spmd()).test(module, held_out, verbose=False)
    assert found[0] == pytest.approx(expected[0], abs=CLOSE)
    expected_rows = torch.cat(trainer(tmp_path).predict(module, held_out))  # type: ignore[arg-type]
    rows = torch.cat([one.cpu() for one in trainer(tmp_path, spmd()).predict(module, held_out)])  # type: ignore
    assert torch.equal(rows, expected_rows)


def test_a_batch_that_the_devices_cannot_divide_evenly_counts_as_on_one(tmp_path: Path) -> None:
    """Nine samples in batches of four leave one, for four devices."""

    def fit(strategy: Any) -> list[float]:
        torch.manual_seed(1)
        module, rows = Classifier(), loaders()[0].dataset
        few = DataLoader(torch.utils.data.Subset(rows, range(9)), 4)
        trainer(tmp_path, strategy, max_epochs=2).fit(module, few, loaders()[1])
        return [float(loss) for loss in module.losses]

    alone, divided = fit("auto"), fit(spmd())
    assert len(alone) == 6 and divided == pytest.approx(alone, abs=CLOSE)


def test_by_name_and_by_the_command_line(tmp_path: Path) -> None:
    """In a fresh process, where the number of devices follows from the Trainer's."""
    command = "strategy=xla_spmd trainer.devices=4 data=digits trainer.max_epochs=1 trainer.limit_train_batches=4"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PJRT", "CPU_NUM", "XLA"))}
    done = subprocess.run(
        [sys.executable, "-m", "lightning_lockstep.train", *command.split(), "trainer.limit_val_batches=1"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    assert "one process uses all XLA devices (4 x CPU); each batch is divided among them." in done.stderr
    assert "steps" in done.stdout and "4 in 1 epoch on 1 rank" in done.stdout
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    weights = torch.load(checkpoint, weights_only=False)["state_dict"]
    assert {value.device.type for value in weights.values()} == {"cpu"}


@pytest.fixture
def tpu_host(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A stand-in for a host with a TPU: Lightning is told that there are four devices."""
    from torch_xla._internal import tpu

    monkeypatch.setattr(tpu, "num_available_devices", lambda: 4)
    for cached in (XLAAccelerator.auto_device_count, XLAAccelerator.is_available):
        cached.cache_clear()  # type: ignore[attr-defined]
        request.addfinalizer(cached.cache_clear)  # type: ignore[attr-defined]


def test_lightning_gives_the_strategy_its_tpu(tmp_path: Path, tpu_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    for precision in ("32-true", "bf16-mixed"):
        made = trainer(tmp_path, spmd(), accelerator="tpu", precision=precision)
        assert isinstance(made.accelerator, XLAAccelerator)
        assert type(made.strategy).__name__ == "LockstepXLASPMDStrategy"
        assert str(made.precision) == precision and "XLA_USE_BF16" not in os.environ


# -- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        (
            {},
            {"precision": "16-true"},
            "precision='16-true': expected one that XLA devices support: 32-true,",
        ),
        (
            {"downcast_bf16": True},
            {},
            "downcast_bf16=True with precision='32-true': expected precision='bf16-true'",
        ),
        ({}, {"devices": 3}, r"devices=3 was given to the Trainer, and torch-xla has 4 \(CPU\)"),
        ({}, {"num_nodes": 2}, "num_nodes=2 with strategy='lockstep_xla_spmd': expected 1"),
    ],
)
def test_what_the_devices_cannot_do(
    tmp_path: Path, strategy: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        fitted(tmp_path, spmd(**strategy), **options)


def test_arguments_of_another_kind() -> None:
    with pytest.raises(ConfigurationError, match="parameters='zero'") as raised:
        spmd(parameters="zero", min_size=-1, downcast_bf16="yes")
    assert "min_size=-1" in str(raised.value) and "downcast_bf16='yes'" in str(raised.value)


@pytest.mark.parametrize("name", ["XLA_USE_BF16", "XLA_DOWNCAST_BF16"])
def test_a_variable_that_torch_xla_has_given_up(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigurationError, match=f"{name}=1: expected precision=bf16-true"):
        fitted(tmp_path, spmd())


@pytest.mark.parametrize("strategy", ["lockstep_xla_spmd", "lockstep_xla"])
def test_a_tpu_that_torch_xla_does_not_take(tmp_path: Path, tpu_host: None, strategy: str) -> None:
    words = r"expected a TPU, .* takes the CPU.*, unset it; .* pip install 'torch-xla\[tpu\]==2\.9\.\*'"
    with pytest.raises(ConfigurationError, match=words):
        trainer(tmp_path, strategy, accelerator="tpu", devices=4)
