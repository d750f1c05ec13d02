"""Which addresses are reached, and ways through members and routers in between."""
