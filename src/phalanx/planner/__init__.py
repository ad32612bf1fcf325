"""Hardware, costs and the search for a strategy: what a run would take, before it starts."""
