"""``notebook_launcher`` in a real kernel: what the cell shows, and Interrupt. Without one: tests/programs/launchers."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.environments.notebook.kernels import Kernel
from tests.harness.patience import wait_until

pytestmark = [pytest.mark.allow_leaks("threads")]

# The matrix product has started threads of OpenMP, which no fork has.
IMPORTS = """
    import logging, os, signal, time
    import torch
    import torch.distributed as dist
    import lightning_lockstep
    from lightning_lockstep import notebook_launcher

    torch.set_num_threads(2)
    matrix = torch.ones(1000, 1000)
    _ = matrix @ matrix
    logging.basicConfig(format="%(message)s")

    def rank():
        return int(os.environ["RANK"])
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        assert kernel.run(IMPORTS).error is None
        yield kernel


def ranks_of(kernel: Kernel) -> list[psutil.Process]:
    return psutil.Process(kernel.pid).children(recursive=True)


def test_the_cell_shows_what_ranks_print_and_gets_the_result_of_rank_0(kernel: Kernel) -> None:
    """What goes through handlers of the kernel included."""
    output = kernel.run("""
        def work(word, tensor):
            if rank() == 0:
                time.sleep(1)  # the other one is through by then
            print(f"{word} {rank()}\\n", end="")  # one write
            logging.getLogger("work").warning("logged")
            return {"rank": rank(), "sum": tensor.sum()}
        notebook_launcher(work, ("hello", torch.ones(3)), num_processes=2)
    """)
    assert output.error is None
    assert output.stdout == "hello 1\nhello 0\n"
    assert output.stderr == "logged\nlogged\n"
    assert output.result == "{'rank': 0, 'sum': tensor(3.)}"


def test_a_rank_that_raises_ends_all_and_the_cell_shows_its_traceback_alone(kernel: Kernel) -> None:
    output = kernel.run("""
        def work():
            if rank() == 1:
                print("before")
                raise ValueError("boom " + "x" * 200_000)
            dist.init_process_group("gloo")  # waits for the other one
        notebook_launcher(work, (), 2, grace_period=1)
    """)
    assert output.error_type == "RankFailedError" and output.error is not None
    assert re.match(r"RankFailedError: rank 1 of 2 \(host .*\) failed: ValueError: boom x", output.error)
    assert "in work\n" in output.error and "launch.py" not in output.error
    assert output.stdout == "before\n"
    assert ranks_of(kernel) == []


def test_interrupt_ends_all_ranks_also_those_that_do_not_listen(kernel: Kernel) -> None:
    output = kernel.run(
        """
        def work():
            if rank() == 1:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            print("ready")
            time.sleep(1000)
        notebook_launcher(work, (), 2, grace_period=1)
        """,
        interrupt_after="ready",
    )
    assert output.error == "KeyboardInterrupt: all ranks have ended."
    assert ranks_of(kernel) == []
    assert kernel.run("1 + 1").result == "2"


def test_interrupt_while_a_rank_is_forked_ends_it_too(kernel: Kernel) -> None:
    output = kernel.run("""
        fork = os.fork
        def interrupted_fork():
            if (pid := fork()):
                os.kill(os.getpid(), signal.SIGINT)
            return pid
        os.fork = interrupted_fork
        try:
            notebook_launcher(time.sleep, (1000,), 2, grace_period=1)
        finally:
            os.fork = fork
    """)
    assert output.error == "KeyboardInterrupt: all ranks have ended."
    assert ranks_of(kernel) == []


def test_a_trainer_starts_ranks_from_a_cell(kernel: Kernel) -> None:
    """A rank that is killed is named, and the kernel is fit for a next Trainer."""
    output = kernel.run("""
        import lightning as L
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        class Model(L.LightningModule):
            def __init__(self, fault=None):
                super().__init__()
                self.layer, self.fault = torch.nn.Linear(4, 1), fault
            def training_step(self, batch, index):
                print(f"step {index};", end="", flush=True)
                if self.fault and self.global_rank == 1:
                    self.fault()
                return self.layer(batch).mean()
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), 0.1)
        def fit(model):
            off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
            off = dict.fromkeys(off, False)
            before = model.layer.weight.clone()
            trainer = L.Trainer(strategy="lockstep_ddp_notebook", accelerator="cpu", devices=2, max_steps=2, **off)
            trainer.fit(model, torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=4))
            return not torch.equal(before, model.layer.weight)
        fit(Model())
    """)
    assert output.error is None, output.error
    assert output.stdout.count("step 0;") == output.stdout.count("step 1;") == 2
    assert output.result == "True" and "2 ranks" in output.all
    output = kernel.run("fit(Model(lambda: os.kill(os.getpid(), signal.SIGKILL)))")
    assert output.error is not None and "\nRankFailedError" not in output.error
    assert re.match(r"RankFailedError: rank 1 of 2 .* was killed by SIGKILL while the others were", output.error)
    assert kernel.run("notebook_launcher(lambda: fit(Model()), (), 2)").result == "True"
    output = kernel.run("fit(Model(lambda: time.sleep(1000)))", interrupt_after="step 0")
    assert output.error_type == "SystemExit", "what Lightning makes of an interrupted fit"
    assert ranks_of(kernel) == []
    assert kernel.run("fit(Model())").result == "True"


def test_ranks_end_with_a_kernel_that_is_killed(tmp_path: Path) -> None:
    with Kernel(tmp_path) as kernel:
        pids = tmp_path / "pids"

        def kill() -> None:
            os.kill(kernel.pid, signal.SIGKILL)

        assert kernel.run(IMPORTS).error is None
        kernel.manager.autorestart = False  # type: ignore[attr-defined]
        kernel.client.execute(f"""
import time, os
def work():
    open({str(pids)!r}, "a").write(f"{{os.getpid()}}\\n")
    time.sleep(1000)
notebook_launcher(work, (), 2)
""")
        assert wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        ranks = [int(pid) for pid in pids.read_text().split()]
        kill()
        assert wait_until(lambda: not any(psutil.pid_exists(pid) for pid in ranks))
