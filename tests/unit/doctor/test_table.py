"""What the doctor prints of the lines to paste."""

from __future__ import annotations

from textwrap import indent

import pytest

from lightning_lockstep.doctor.command import console, print_fixes, print_result
from lightning_lockstep.doctor.registry import CheckResult, Finding, Status, ok, problem, warning


def test_lines_to_paste_are_printed_once_for_all_findings_that_need_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = [
        CheckResult("mpi", (warning("prted", "on a", "mpirun --prefix /v"),) * 2, 0.1),
        CheckResult(
            "network",
            (
                problem("interfaces", "on a", "export A=1"),
                problem("interfaces", "on b", "export B=2"),
                problem("interfaces", "on c", "export A=1"),
                problem("ranks", "late", "wait"),
                Finding(Status.OK, "build", "may be done before", ("make",)),
            ),
            0.1,
        ),
    ]
    print_fixes(console(of_a_rank=False), results)
    assert capsys.readouterr().out.split("\n\n") == [
        "\nTo fix, paste:",
        "# 1. network: interfaces\nexport A=1",
        "# 2. network: interfaces\nexport B=2",
        "# 3. network: ranks\nwait",
        "# 4. mpi: prted\nmpirun --prefix /v",
        "# 5. network: build (optional)\nmake\n",
    ]
    print_fixes(console(of_a_rank=False), [CheckResult("run", (ok("checkpoints", "1", "resume"),), 0.1)])
    assert capsys.readouterr().out.startswith("\nOptional:\n"), "nothing is broken"


def test_a_table_or_traceback_in_a_row_is_as_wide_as_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    block = "Traceback" + "x" * 150 + "\n  y"
    print_result(
        console(of_a_rank=False),
        CheckResult("deepspeed", (ok("memory", f"of 8 ranks:\n{block}"), ok("b", "c"))),
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["deepspeed", "ok", "memory", "of", "8", "ranks:"]
    assert lines[1:3] == indent(block, "  ").splitlines() and lines[3].split() == ["ok", "b", "c"]
