"""Recording traces, checking them, and walking through them."""
