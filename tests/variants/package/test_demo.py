"""`scripts/demo` from its first line to its last, with fewer epochs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.harness import run_script
from tests.programs.package.test_demo import ROOT


def test_the_trained_network_has_one_accuracy_on_any_number_of_ranks(tmp_path: Path) -> None:
    script = tmp_path / "demo"
    text = (ROOT / "scripts" / "demo").read_text().replace('cd "$(dirname "$0")/.."\nscripts/setup run\n', "")
    assert "trainer.max_epochs=8" in text
    text = text.replace("trainer.max_epochs=8", "trainer.max_epochs=3")
    script.write_text(text.replace(".venv/bin", str(Path(sys.executable).parent)))
    done = run_script(["bash", script], timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.output
    found = re.findall(r"^  (\d) ranks?: +accuracy ([\d.]+), loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert [ranks for ranks, _, _ in found] == ["1", "2", "3"], done.output
    assert len({(accuracy, loss) for _, accuracy, loss in found}) == 1, found
    assert float(found[0][1]) >= 0.95
