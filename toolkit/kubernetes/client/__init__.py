"""The API server: a connection, its resources, and commands in pods."""
