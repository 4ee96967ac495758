"""Hydra programs started again as further ranks, with one configuration and one run folder."""
