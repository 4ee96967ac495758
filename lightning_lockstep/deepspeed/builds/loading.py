"""DeepSpeed's ops that a module loads by itself (``DeepSpeedCPUAdam``), built as those of a configuration are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_lockstep._doors.deepspeed_internals import load_of_ops, op_name, put_load_of_ops
from lightning_lockstep.deepspeed.builds.tools import OPS
from lightning_lockstep.errors import LaunchError

__all__ = ["prepared_where_loaded"]


@contextmanager
def prepared_where_loaded(prepare: Callable[[list[str]], None]) -> Iterator[None]:
    """Have each op that the body loads prepared by all ranks first.

    Left alone, DeepSpeed's optimizers compile their op when they are made: every rank of a node at the same
    time, without a message, and behind a lock that a killed build may have left. The body loads the same ops
    in the same order on every rank.
    """
    load = load_of_ops()
    prepared: set[str] = set()
    failed: list[LaunchError] = []
    is_preparing = False

    def prepare_and_load(builder: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_preparing
        # What a build loads by itself is a matter of the rank that builds.
        name = op_name(builder)
        if not is_preparing and name in OPS and name not in prepared:
            is_preparing = True
            try:
                prepare([name])
            except LaunchError as error:
                failed.append(error)
                raise
            finally:
                is_preparing = False
            prepared.add(name)
        return load(builder, *args, **kwargs)

    put_load_of_ops(prepare_and_load)
    try:
        yield
    except Exception as error:
        within = next((one for one in _causes(error) if one in failed), None)
        if within is None or within is error:
            raise
        raise within from None
    finally:
        put_load_of_ops(load)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those from which it was raised."""
    known: BaseException | None = error
    while known is not None:
        yield known
        known = known.__cause__
