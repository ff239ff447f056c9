"""
Native core of poolweave: arenas, blocks, the radix tree, copies and streams.
"""
