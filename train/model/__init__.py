"""What happens to a model and its optimizer on each rank, whatever the strategy."""
