"""The training step and the loop around it; `job` comes before them, `report` after."""
