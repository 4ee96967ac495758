"""Loggers that know about ranks, and lines of all ranks in rank order."""

from lightning_lockstep.logs.logger import RankLogger, get_logger
from lightning_lockstep.logs.rank_order import in_rank_order

__all__ = ["RankLogger", "get_logger", "in_rank_order"]
