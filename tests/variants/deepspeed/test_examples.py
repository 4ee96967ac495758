"""The configs of DeepSpeed's own tutorials and of Transformers train on two CPU ranks, with ``adapt=True``."""

from __future__ import annotations

import copy
import io
import json
import os
from contextlib import redirect_stderr
from typing import Any

import pytest

from lightning_lockstep.deepspeed.importing import load_ops
from lightning_lockstep.errors import LaunchError, RankFailedError
from tests.harness import run_ranks
from tests.models.deepspeed import run_config
from tests.models.deepspeed.example_configs import OF_DEEPSPEED, OF_TRANSFORMERS

#: Batch size of each.
TUTORIALS = {"zero-infinity": 4, "zero++": 4}


def fits_of_tutorials(folder: str) -> dict[str, tuple[list[float], str]]:
    found = {}
    for name, batch_size in TUTORIALS.items():
        config = json.loads(json.dumps(OF_DEEPSPEED[name]).replace("/local_nvme", folder))
        net, said = run_config.Net(), io.StringIO()
        with redirect_stderr(said):
            run_config.trainer(config).fit(net, run_config.loader(batch_size))
        found[name] = net.losses, said.getvalue()
    return found


def fits_of_transformers() -> dict[str, Any]:
    found = {}
    for name in ("transformers-zero-2", "accelerate-zero-3"):
        config = copy.deepcopy(OF_TRANSFORMERS[name])
        config["optimizer"]["params"]["torch_adam"] = True
        net = run_config.Net()
        runner = run_config.trainer(config, max_epochs=2)
        runner.fit(net, run_config.loader(), run_config.loader())
        complete = run_config.config_of(runner)
        (tested,) = runner.test(net, run_config.loader(), verbose=False)
        predicted: Any = runner.predict(net, run_config.loader())
        runner.fit_loop.max_epochs = 3
        runner.fit(net, run_config.loader(4), run_config.loader())
        found[name] = {
            "optimizer": complete["optimizer"]["params"],
            "scheduler": complete.get("scheduler", {}).get("params"),
            "tested": tested["loss"],
            "predicted": len(predicted),
            "batch": run_config.config_of(runner)["train_micro_batch_size_per_gpu"],
        }
    return found


def build_without_a_compiler() -> str:
    os.environ["CXX"] = "no-such-compiler"
    with pytest.raises((LaunchError, RankFailedError)) as caught:
        load_ops(["CPUAdamBuilder"], timeout=60.0)
    return str(caught.value)


def all_fits(folder: str) -> dict[str, Any]:
    return {
        "fits": fits_of_tutorials(folder),
        "of Transformers": fits_of_transformers(),
        "build": build_without_a_compiler(),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, all_fits, str(tmp_path_factory.mktemp("nvme")), timeout=240)


def test_the_tutorials_train_with_adapt(found: list[dict[str, Any]]) -> None:
    one, other = (of_rank["fits"] for of_rank in found)
    replacements = {
        "zero-infinity": ("zero_optimization.offload_optimizer.ratio=1.0 instead of", "=0.3"),
        "zero++": (
            "zero_quantized_weights=False",
            "zero_optimization.zero_quantized_gradients=False instead of",
        ),
    }
    for name, batch_size in TUTORIALS.items():
        losses, said = one[name]
        assert len(losses) == 32 // batch_size
        # Each is of other samples, so the first one may be the lowest.
        assert all(loss == loss for loss in losses) and len(set(losses)) == len(losses), name
        assert all(words in said for words in replacements[name]), said
        assert "instead of" not in other[name][1], "one rank says it"


def test_configurations_of_transformers_train_and_evaluate(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        for name, one in of_rank["of Transformers"].items():
            assert one["optimizer"]["lr"] == 0.02, name
            assert one["scheduler"] is None or one["scheduler"]["warmup_max_lr"] == 0.02
            assert one["tested"] < 1.2 and one["predicted"] == 4 and one["batch"] == 4
        assert of_rank["of Transformers"]["accelerate-zero-3"]["scheduler"]["total_num_steps"] == 8


def test_an_op_that_cannot_be_built_fails_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert "could not build DeepSpeed's op cpu_adam" in of_rank["build"]
        assert "Fix it with: lockstep-doctor cuda deepspeed" in of_rank["build"]
