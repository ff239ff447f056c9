"""The HTTP front door: an OpenAI-compatible server in front of a deployment's instances."""
