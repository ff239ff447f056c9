"""CrossPool's decode engine as an instance behind serving's protocol."""
