"""What is the same wherever a run is: its handle, status, record, directory, logs and failure."""
