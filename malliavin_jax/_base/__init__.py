"""What every room stands on: types, checks, devices, small tensors, checkpoints, progress."""
