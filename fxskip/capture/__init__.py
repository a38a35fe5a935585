"""From a model to the graph of one region a decoder layer."""
