"""Which instance a request goes to: prompt trees, cost model, policies, membership. Pure: no I/O."""
