"""Run a strategy beside one process and compare every number that training depends on."""
