"""The adapter in one process: a standard logger with three more keywords."""

from __future__ import annotations

import logging
import sys

import pytest

import lightning_lockstep
from lightning_lockstep import ConfigurationError, get_logger


@pytest.fixture
def name(request):
    """A logger of this test alone, that hands nothing to the root logger."""
    name = f"test.{request.node.name}"
    yield name
    logger = logging.getLogger(name)
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def kept_on(name: str) -> list[logging.LogRecord]:
    handler = Kept()
    logging.getLogger(name).addHandler(handler)
    return handler.records


@pytest.mark.parametrize("keywords", [{}, {"main_process_only": False}, {"in_order": True}])
def test_without_a_distributed_run_it_is_a_plain_logger(name, keywords):
    records = kept_on(name)
    log = get_logger(name, "DEBUG")
    log.debug("%s and %d", "a", 2, **keywords)
    assert [r.getMessage() for r in records] == ["a and 2"]


def test_file_line_and_function_are_the_callers(name):
    records = kept_on(name)
    log = get_logger(name, "INFO")
    here = sys._getframe().f_lineno + 1
    log.info("here")
    log.log(logging.INFO, "and here", in_order=True)
    assert [r.lineno for r in records] == [here, here + 1]
    assert {r.filename for r in records} == {"test_get_logger.py"}
    assert {r.funcName for r in records} == {"test_file_line_and_function_are_the_callers"}


def test_unknown_keywords_are_an_error(name):
    with pytest.raises(TypeError, match="in_ordr"):
        get_logger(name, "INFO").info("x", in_ordr=True)


def test_the_root_loggers_level_is_never_touched(name, monkeypatch):
    before = logging.getLogger().level
    get_logger(name, "DEBUG")
    monkeypatch.setenv("LOCKSTEP_LOG_LEVEL", "error")
    log = get_logger(name + ".env")
    assert log.getEffectiveLevel() == logging.ERROR
    assert logging.getLogger().level == before
    monkeypatch.delenv("LOCKSTEP_LOG_LEVEL")
    assert get_logger(name).logger.level == logging.DEBUG, "an earlier choice stands"


def test_a_level_that_does_not_exist_is_refused(name, monkeypatch):
    with pytest.raises(ConfigurationError, match="log_level='LOUD': expected one of DEBUG, INFO"):
        get_logger(name, "LOUD")
    monkeypatch.setenv("LOCKSTEP_LOG_LEVEL", "verbose")
    with pytest.raises(ConfigurationError, match="LOCKSTEP_LOG_LEVEL is 'verbose'"):
        get_logger(name)


def test_a_rank_known_only_from_the_environment_says_nothing_for_the_main_rank(name, monkeypatch):
    from lightning_lockstep._lightning import rank_zero_only

    monkeypatch.setattr(rank_zero_only, "rank", 3, raising=False)
    records = kept_on(name)
    log = get_logger(name, "INFO")
    log.info("main only")
    log.info("everybody", main_process_only=False)
    assert [r.getMessage() for r in records] == ["[rank 3] everybody"]


def test_in_rank_order_without_ranks_just_runs():
    with lightning_lockstep.in_rank_order() as rank:
        assert rank == 0
    with pytest.raises(ConfigurationError, match="timeout=0"), lightning_lockstep.in_rank_order(timeout=0):
        pass
