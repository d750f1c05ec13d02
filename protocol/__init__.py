"""Messages between peers, and the pure state machines that decide what follows from them."""
