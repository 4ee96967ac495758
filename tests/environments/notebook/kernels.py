"""Real kernels of IPython, run as a notebook server runs them, and what a cell shows."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client import BlockingKernelClient, KernelManager
from jupyter_client.kernelspec import KernelSpec

LIMIT = 90.0  # only so that a hang ends the test


@dataclass
class CellOutput:
    """What a cell has shown."""

    shown: list[tuple[str, str]] = field(default_factory=list)
    """(stream, text) in the order in which it came."""
    result: str | None = None
    error: str | None = None
    """The traceback that the cell shows."""
    error_type: str | None = None

    @property
    def stdout(self) -> str:
        return "".join(text for name, text in self.shown if name == "stdout")

    @property
    def stderr(self) -> str:
        return "".join(text for name, text in self.shown if name == "stderr")

    @property
    def all(self) -> str:
        return "".join(text for _, text in self.shown) + (self.error or "")


class Kernel:
    """A kernel in a process of its own; a context manager."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self._environment = {
            **os.environ,
            "IPYTHONDIR": str(folder / "ipython"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            **environment,
        }
        self._folder = folder
        self.manager = KernelManager(
            connection_file=str(folder / "kernel.json"), transport="ipc", ip=str(folder / "socket")
        )
        self.manager._kernel_spec = KernelSpec(
            argv=[
                sys.executable,
                "-Xfrozen_modules=off",
                "-m",
                "ipykernel_launcher",
                "-f",
                "{connection_file}",
            ],
            language="python",
        )
        self.client: BlockingKernelClient

    def __enter__(self) -> Kernel:
        self.manager.start_kernel(env=self._environment, cwd=str(self._folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    def run(self, cell: str, *, interrupt_after: str = "", then: Callable[[], None] | None = None) -> CellOutput:
        """Run a cell and return what it shows; interrupts it, or calls a function, once it has shown a text."""
        output, done = CellOutput(), False

        def take(message: dict[str, Any]) -> None:
            nonlocal done
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                output.shown.append((content["name"], content["text"]))
            elif kind == "execute_result":
                output.result = content["data"]["text/plain"]
            elif kind == "error":
                output.error = "\n".join(content["traceback"])
                output.error_type = content["ename"]
            if interrupt_after and not done and interrupt_after in output.all:
                done = True
                (then or self.manager.interrupt_kernel)()

        self.client.execute_interactive(textwrap.dedent(cell), output_hook=take, timeout=LIMIT)
        return output
