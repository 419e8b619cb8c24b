"""What a compiled program sends between its devices, read from the program alone."""
