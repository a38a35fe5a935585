"""Benchmarks that a user can repeat: each writes its command, versions, hardware and raw samples."""
