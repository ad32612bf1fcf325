"""The training step and the training loop; `job` prepares a run, `report` records its results."""
