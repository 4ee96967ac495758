"""XLA devices in ranks that a notebook starts: one model made outside; refused once the kernel has used them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.environments.notebook.kernels import Kernel

pytestmark = [pytest.mark.allow_leaks("threads")]


def test_ranks_have_their_devices_and_the_kernel_must_have_none(tmp_path: Path) -> None:
    with Kernel(tmp_path, PJRT_DEVICE="CPU", CPU_NUM_DEVICES="1", XLA_USE_SPMD="0") as kernel:
        output = kernel.run("""
            import os
            import lightning as L
            import torch, torch_xla
            from lightning_lockstep import notebook_launcher
            model = torch.nn.Linear(4, 4)
            with torch.no_grad():
                model.weight.fill_(1.0)
                model.bias.zero_()
            def work(model):
                device = torch_xla.device()
                result = model.to(device)(torch.ones(2, 4, device=device)).sum()
                torch_xla.sync()
                rank = os.environ["PJRT_LOCAL_PROCESS_RANK"], os.environ["PJRT_LOCAL_PROCESS_COUNT"]
                print(" ".join((str(result.item()), device.type, *rank)) + "\\n", end="")  # one write
                return result.item()
            notebook_launcher(work, (model,), num_processes=2)
        """)
        assert output.error is None, output.error
        assert sorted(output.stdout.splitlines()) == ["32.0 xla 0 2", "32.0 xla 1 2"]
        assert output.result == "32.0"
        assert kernel.run("model.weight.device.type").result == "'cpu'"
        output = kernel.run("""
            import lightning_lockstep
            on_device = torch.ones(2, device=torch_xla.device())
            strategy = lightning_lockstep.LockstepDDPStrategy(start_method="fork")
            try:
                L.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
            except lightning_lockstep.LaunchError as error:
                print(error)
            notebook_launcher(work, (model,), 2)
        """)
        assert output.stdout.startswith("XLA was already used in this process"), output.error
        assert output.error_type == "LaunchError" and output.error is not None
        assert "XLA was already used in this process" in output.error
