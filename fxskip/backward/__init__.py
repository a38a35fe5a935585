"""Regions whose backward runs in a planned order, not in the mirror image of the forward's."""
