"""Generation with a trained decoder: paged key-value cache, scheduler, engine, HTTP server."""
