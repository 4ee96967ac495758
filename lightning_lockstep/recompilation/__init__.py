"""Which steps had to compile, and why: for ``torch.compile`` on any device, and for torch-xla."""
