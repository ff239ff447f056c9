"""Services as operating-system processes: started, told their settings, watched and ended."""
