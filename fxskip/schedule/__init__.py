"""What a region's operations cost, in which order they run under collectives, and what that hides."""
