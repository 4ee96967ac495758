"""The room of DeepSpeed: its config read, checked and completed, and its engine joined with the Trainer."""
