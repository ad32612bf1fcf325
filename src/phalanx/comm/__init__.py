"""The only caller of collectives: the communicator, and the ledger."""
