"""Passes on a captured region: graph in, graph out. `fxskip.pipeline` says in which order they run."""
