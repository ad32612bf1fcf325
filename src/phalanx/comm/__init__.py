"""The only caller of collectives: primitives that name their axis, and the ledger."""
