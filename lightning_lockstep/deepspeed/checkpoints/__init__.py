"""Checkpoint folders of DeepSpeed: written whole or not at all, loaded, and put together to one plain file."""
