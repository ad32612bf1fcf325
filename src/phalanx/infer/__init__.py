"""Generation from a trained decoder: blocks of the cache, scheduler, runner, engine, HTTP."""
