"""`poolweave plan`: its settings file and its picture."""
