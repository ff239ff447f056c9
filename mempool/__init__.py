"""The elastic block pool over HBM and DRAM."""
