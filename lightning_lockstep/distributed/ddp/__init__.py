"""What is needed of DistributedDataParallel: its reducer and its communication hooks."""
