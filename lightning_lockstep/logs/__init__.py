"""Loggers that know about ranks, and lines of all ranks in rank order."""

from lightning_lockstep.distributed.coordination.rank_order import in_rank_order
from lightning_lockstep.logs.logger import RankLogger, get_logger

__all__ = ["RankLogger", "get_logger", "in_rank_order"]
