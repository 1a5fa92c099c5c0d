"""The process among its ranks: rank, devices, rendezvous, process group, signals."""
