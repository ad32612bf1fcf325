"""Communication between ranks: the communicator, its engines, and the ledger that counts calls."""
