"""The secret of a job: who has it, and what is refused without it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lightning_lockstep.distributed import rendezvous
from lightning_lockstep.distributed.rendezvous import known_job_token, signed, verified
from lightning_lockstep.errors import LaunchError
from tests.harness import run_ranks_raw

ON_ONE_HOST = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LOCKSTEP_JOB_TOKEN", raising=False)
    monkeypatch.setattr(rendezvous, "_made", None)
    for name, value in ON_ONE_HOST.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_ranks_of_one_host_derive_it_from_a_file_of_their_user(home: Path) -> None:
    token = known_job_token()
    key = home / "lightning-lockstep" / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    assert token is not None and known_job_token() == token, "every rank finds the same"
    assert sorted(path.name for path in key.parent.iterdir()) == ["key"], "nothing is left beside it"


def test_another_job_has_another(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = known_job_token()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert known_job_token() not in (None, token)


def test_a_key_that_others_can_read_is_not_used(home: Path) -> None:
    known_job_token()
    (home / "lightning-lockstep" / "key").chmod(0o644)
    assert known_job_token() is None


def test_on_several_hosts_there_is_none_unless_it_is_given(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert known_job_token() is None
    monkeypatch.setenv("LOCKSTEP_JOB_TOKEN", "given")
    assert known_job_token() == "given"


def test_a_signature_of_another_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_JOB_TOKEN", "one")
    data = signed(b"content")
    assert verified(data) == b"content"
    for forged in (data[:-1] + b"T", bytes(32) + b"content", b"content", b""):
        with pytest.raises(LaunchError, match="is not signed with this job's token"):
            verified(forged)
    monkeypatch.setenv("LOCKSTEP_JOB_TOKEN", "two")
    with pytest.raises(LaunchError, match="LOCKSTEP_JOB_TOKEN"):
        verified(data)


def other_tokens() -> str:
    from lightning_lockstep.distributed import current_communicator

    os.environ["LOCKSTEP_JOB_TOKEN"] = f"of rank {os.environ['RANK']}"
    try:
        return f"open: {current_communicator().side_channel.usable}"
    except LaunchError as error:
        return str(error)


def test_ranks_with_different_tokens_are_told_apart_at_once() -> None:
    outcomes = run_ranks_raw(2, other_tokens, timeout=60)
    assert outcomes[0].value == "open: True"
    assert "Rank 1 of 2 has another LOCKSTEP_JOB_TOKEN than rank 0" in outcomes[1].value
