"""`phalanx show`: topics that run a method and show its steps, a printer and an SVG renderer."""
