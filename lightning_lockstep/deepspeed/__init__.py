"""The room of DeepSpeed: its config read, checked and completed, and its engine joined with the Trainer.

``python -m lightning_lockstep.deepspeed.memory_estimate`` is a command for users.
"""
