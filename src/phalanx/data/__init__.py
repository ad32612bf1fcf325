"""Data pipeline from text to microbatches: corpus, tokenizer, token files, order, loader."""
