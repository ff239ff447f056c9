"""`poolweave doctor`: what is active on this machine, what is not, and the fix for each."""
