"""What torchrun gives a process: its rank, the rendezvous, the process group, signals."""
