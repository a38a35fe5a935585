"""What the nodes of a parallel region run: exchanges between ranks, in flight while other nodes run."""
