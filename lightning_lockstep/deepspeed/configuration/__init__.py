"""DeepSpeed's configuration: read, checked against DeepSpeed, the device and the Trainer, and completed."""
