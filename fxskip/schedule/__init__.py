"""What a region's operations cost. Ordering them under collectives comes with the scheduler."""
