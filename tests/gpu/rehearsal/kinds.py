"""The GPUs that are rehearsed: of their properties, those in which they differ."""

KINDS = {
    "a100": {"major": 8, "minor": 0, "multi_processor_count": 108, "shared_kb": 163},
    "h100": {"major": 9, "minor": 0, "multi_processor_count": 132, "shared_kb": 227},
}
"""`shared_kb`: the shared memory that a block may have."""
