"""What every room stands on: types, checks, devices, small tensors, files, fingerprints, checkpoints, progress."""
